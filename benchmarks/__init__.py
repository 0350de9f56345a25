"""What this software costs, each number beside the floor measured in the same run. See README.md."""
