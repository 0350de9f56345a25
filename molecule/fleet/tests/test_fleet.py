"""Check each platform with a single command, because every command through Ansible takes seconds."""

testinfra_hosts = ["platforms"]


def test_each_platform_has_only_its_own_greeting(host):
    platform = host.backend.get_hostname().rpartition("-")[2]
    result = host.run("ls /srv/greeting; cat /srv/greeting/*")
    assert result.succeeded, result.stderr
    assert result.stdout.splitlines() == ["greeting", f"{platform} greets"]
