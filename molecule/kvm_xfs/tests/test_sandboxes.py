"""Checks each sandbox from the inside with one command through the connection plugin, without Python."""

testinfra_hosts = ["source", "copies"]


def test_each_sandbox_has_its_own_state(host):
    said = host.ansible("raw", "hostname; cat /dev/shm/note /root/note; cat /root/own || :", check=False)
    name = host.backend.get_hostname()
    assert said["stdout"].splitlines() == [name, "kept", "source", *([] if name == "source" else [name])]
