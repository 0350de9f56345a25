"""Sends one command to each platform, because every command through Ansible takes seconds."""

testinfra_hosts = ["platforms"]


def test_each_platform_has_only_its_own_greeting(host):
    platform = host.backend.get_hostname().rpartition("-")[2]
    said = host.run("ls /srv/greeting; cat /srv/greeting/*")
    assert said.succeeded, said.stderr
    assert said.stdout.splitlines() == ["greeting", f"{platform} greets"]
