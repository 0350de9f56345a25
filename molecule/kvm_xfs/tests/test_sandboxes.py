"""Checks each sandbox from the inside with one command through the connection plugin, without Python."""

testinfra_hosts = ["source", "copies"]


def test_each_sandbox_has_what_it_was_forked_with_and_what_is_its_own(host):
    said = host.ansible("raw", "hostname; cat /dev/shm/note /root/note; cat /root/own || :", check=False)
    name = host.backend.get_hostname()
    assert said["stdout"].splitlines() == [name, "kept", "source", *([] if name == "source" else [name])]
