"""Checks each sandbox from the inside with one command, because every command through Ansible takes seconds."""

testinfra_hosts = ["source", "copies"]


def test_each_sandbox_has_what_it_was_forked_with_and_what_is_its_own(host):
    said = host.run("hostname; cat /root/note; cat /root/own")
    name = host.backend.get_hostname()
    assert said.stdout.splitlines() == [name, "source", *([] if name == "source" else [name])]
