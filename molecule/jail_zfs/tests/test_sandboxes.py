"""Check each sandbox with a single command, because every command through Ansible takes seconds."""

testinfra_hosts = ["source", "copies"]


def test_each_sandbox_has_its_own_state(host):
    result = host.run("hostname; cat /root/note; cat /root/own")
    name = host.backend.get_hostname()
    assert result.stdout.splitlines() == [name, "source", *([] if name == "source" else [name])]
