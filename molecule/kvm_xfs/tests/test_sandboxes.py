"""Check each sandbox with a single command through the connection plugin, without Python."""

testinfra_hosts = ["source", "copies"]


def test_each_sandbox_has_its_own_state(host):
    result = host.ansible("raw", "hostname; cat /dev/shm/note /root/note; cat /root/own || :", check=False)
    name = host.backend.get_hostname()
    assert result["stdout"].splitlines() == [name, "kept", "source", *([] if name == "source" else [name])]
