"""Checks each sandbox from the inside with one command, because every command through Ansible takes seconds."""

testinfra_hosts = ["source", "copies"]


def test_each_sandbox_has_its_own_state(host):
    said = host.run("hostname; cat /root/note; cat /root/own")
    name = host.backend.get_hostname()
    assert said.stdout.splitlines() == [name, "source", *([] if name == "source" else [name])]
