#!/bin/sh
# Set address and route. They are the same in every sandbox, so that a fork need not change them.
# Find the card by its MAC address, because the kernel may have named it before udev's rules were loaded.
modprobe -q virtio_net
tries=0
while [ "$tries" -lt 100 ]; do
    for card in /sys/class/net/*; do
        read -r mac < "$card/address" || continue
        [ "$mac" = "@GUEST_MAC@" ] && break 2
    done
    card=
    tries=$((tries + 1))
    sleep 0.1
done
[ -n "$card" ] || { echo "no network card with address @GUEST_MAC@" >&2; exit 1; }
name=${card##*/}
[ -e /proc/sys/net/ipv6 ] && echo 1 > "/proc/sys/net/ipv6/conf/$name/disable_ipv6"
ip -batch - <<END
link set dev lo up
link set dev $name up
address replace @GUEST_ADDRESS@/@GUEST_PREFIX_LENGTH@ dev $name
route replace default via @GATEWAY_ADDRESS@ dev $name
END
# Volumes need this module. Loading it takes seconds, so load it while the template boots: forks inherit it.
modprobe -q nfsv3 &
