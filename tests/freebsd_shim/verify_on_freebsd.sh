#!/bin/sh
# Check on a real FreeBSD 14 that its commands behave as the jail host expects.
#
#   sh verify_on_freebsd.sh [-v]
#
# Run it as root. It creates a pool on a memory disk, jails, epairs and a bridge, whose names all begin with "vfy", and
# removes them at the end. It changes neither pf's main ruleset nor any other setting, and loads no kernel module except
# if_bridge, if_epair and nullfs. It prints a table of its observations, in full with -v. The exit status is 1 if a check
# failed. With FREEBSD_SHIM_STATE, it runs on Linux with the doubles in tests/freebsd_shim, and skips what they lack.

set -u
PATH=${PATH:-}:/sbin:/bin:/usr/sbin:/usr/bin
export PATH LC_ALL=C

POOL=vfypool$$
BRIDGE=vfybr
GROUP=vfy-epair
JAIL=vfy-a
OUTER=vfy-2a
INNER=vfy-2b
NETWORK=198.18.77
MAC=02:5b:c6:12:4d:02
ANCHOR=sbx/vfy-a

verbose=no
if [ "${1:-}" = -v ]; then
    verbose=yes
elif [ $# -gt 0 ]; then
    echo "usage: $0 [-v]" >&2
    exit 2
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "$0: run this as root" >&2
    exit 2
fi
on_freebsd=yes
if [ "$(uname -s)" != FreeBSD ]; then
    on_freebsd=no
    if [ -z "${FREEBSD_SHIM_STATE:-}" ]; then
        echo "$0: this is not FreeBSD" >&2
        exit 2
    fi
fi

directory=$(cd "$(mktemp -d "${TMPDIR:-/tmp}/vfy.XXXXXX")" && pwd -P)
root=$directory/pool/clone
disk=
counts_ok=0
counts_failed=0
counts_skipped=0
openzfs=no
zfs version >/dev/null 2>&1 && openzfs=yes

# zfs-fuse hangs if two commands mount file systems at the same time.
if [ -d /var/run/zfs ] && [ $on_freebsd = no ]; then
    zfs_program=$(command -v zfs)
    zpool_program=$(command -v zpool)
    zfs() {
        case $1 in
        create | clone | mount | rename | rollback | receive) flock /var/run/zfs "$zfs_program" "$@" ;;
        *) "$zfs_program" "$@" ;;
        esac
    }
    zpool() {
        flock /var/run/zfs "$zpool_program" "$@"
    }
fi

# -- helpers ---------------------------------------------------------------------------------------------------------

# Run a command that must succeed, and print its output.
ok() {
    if output=$("$@" 2>&1); then
        [ -z "$output" ] || printf '%s\n' "$output"
        return 0
    fi
    skip_if_unsupported "$output"
    printf '%s failed: %s\n' "$*" "$output"
    exit 1
}

# Run a command that must fail with a message that contains the first argument.
refused() {
    expected=$1
    shift
    if output=$("$@" 2>&1); then
        printf '%s succeeded, but should have failed with "%s"\n' "$*" "$expected"
        exit 1
    fi
    skip_if_unsupported "$output"
    contains "$expected" "$output"
    printf '%s\n' "$output"
}

# Destroy a dataset. zfs-fuse reports it as busy for a moment after it was unmounted.
destroy() {
    for _ in 1 2 3 4 5 6 7 8 9; do
        zfs destroy "$@" 2>/dev/null && return
        sleep 1
    done
    ok zfs destroy "$@"
}

contains() {
    case $2 in
    *"$1"*) ;;
    *)
        printf 'expected "%s", but saw: %s\n' "$1" "$2"
        exit 1
        ;;
    esac
}

lacks() {
    case $2 in
    *"$1"*)
        printf 'unexpected "%s" in: %s\n' "$1" "$2"
        exit 1
        ;;
    esac
}

skip() {
    printf '%s\n' "$*"
    exit 77
}

skip_if_unsupported() {
    case $1 in
    *freebsd-shim:*) skip "$1" ;;
    esac
}

# End the check with the status $1 of an `ok` in a command substitution, and print its message $2.
pass_on() {
    printf '%s\n' "$2"
    exit "$1"
}

need_openzfs() {
    [ $openzfs = yes ] || skip "needs OpenZFS"
}

need_freebsd() {
    [ $on_freebsd = yes ] || skip "needs FreeBSD"
}

# Run a check in a subshell, so that it can end with `exit`, and print a row of the report.
check() {
    name=$1
    shift
    seen=$("$@")
    case $? in
    0)
        result=ok
        counts_ok=$((counts_ok + 1))
        ;;
    77)
        result=skipped
        counts_skipped=$((counts_skipped + 1))
        ;;
    *)
        result=FAILED
        counts_failed=$((counts_failed + 1))
        ;;
    esac
    if [ $verbose = yes ] || [ $result = FAILED ]; then
        printf '%-8s %s\n' "$result" "$name"
        [ -z "$seen" ] || printf '%s\n' "$seen" | sed 's/^/             /'
    else
        printf '%-8s %-58s %s\n' "$result" "$name" "$(printf '%s' "$seen" | tail -n 1 | cut -c 1-70)"
    fi
}

# shellcheck disable=SC2317  # the trap calls it
clean_up() {
    status=$?
    trap - EXIT INT TERM HUP
    for jail in $JAIL vfy-b vfy-c; do
        pkill -KILL -j "$jail" >/dev/null 2>&1
        jail -R "$jail" >/dev/null 2>&1
        rctl -r "jail:$jail" >/dev/null 2>&1
    done
    for interface in $(ifconfig -g $GROUP 2>/dev/null) $BRIDGE; do
        ifconfig "$interface" destroy >/dev/null 2>&1
    done
    arp -d $NETWORK.2 >/dev/null 2>&1
    pfctl -q -a $ANCHOR -F all >/dev/null 2>&1
    cd /
    # Twice, because a mount can cover another one.
    for _ in 1 2; do
        mount | sed -n "s,^.* on \\($directory/pool/[^ ]*\\) .*,\\1,p" | sort -r | while read -r node; do
            case $node in
            */clone | */volume | */origin | */renamed) ;;
            *) umount -f "$node" >/dev/null 2>&1 ;;
            esac
        done
    done
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
        zpool destroy -f $POOL >/dev/null 2>&1 && break
        sleep 1
    done
    ! zpool list -H -o name $POOL 2>/dev/null || echo "the pool $POOL could not be destroyed"
    [ -z "$disk" ] || mdconfig -d -u "$disk"
    # -x: stay out of file systems that could not be unmounted.
    if [ $on_freebsd = yes ]; then rm -rfx "$directory"; else rm -rf --one-file-system "$directory"; fi
    exit $status
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

# -- ZFS -------------------------------------------------------------------------------------------------------------

create_pool() {
    ok zfs create $POOL/origin
    ok mkdir "$directory/pool/origin/etc" "$directory/pool/origin/dev" "$directory/pool/origin/vol"
    ok zfs snapshot -o vfy:record=one $POOL/origin@base
    ok zfs list -H -t snapshot -d 1 -s createtxg -o name $POOL/origin
}

clone_with_properties() {
    ok zfs clone -o vfy:own=two $POOL/origin@base $POOL/clone
    contains "$(printf 'vfy:own\ttwo\tlocal')" "$(zfs get -Hp -o property,value,source vfy:own,vfy:record $POOL/clone)"
    contains "$(printf 'vfy:record\t-\t-')" "$(zfs get -Hp -o property,value,source vfy:own,vfy:record $POOL/clone)"
    ok zfs get -Hp -o name,property,value,source mounted,origin $POOL/clone
}

take_several_snapshots() {
    need_openzfs
    ok zfs create $POOL/volume2
    ok zfs snapshot -o vfy:together=yes $POOL/volume2@x $POOL/clone@x
    [ "$(zfs get -Hp -o value createtxg $POOL/volume2@x)" = "$(zfs get -Hp -o value createtxg $POOL/clone@x)" ] || {
        echo "the snapshots are from different transaction groups"
        exit 1
    }
    refused "already exists" zfs snapshot $POOL/volume2@y $POOL/clone@x
    refused "does not exist" zfs list $POOL/volume2@y
    destroy $POOL/clone@x
    destroy -r $POOL/volume2
}

refuse_to_destroy_a_cloned_snapshot() {
    refused "dependent clones" zfs destroy $POOL/origin@base
}

refuse_to_destroy_a_missing_dataset() {
    refused "does not exist" zfs destroy $POOL/missing
}

deferred_destroy() {
    ok zfs snapshot $POOL/origin@deferred
    ok zfs clone $POOL/origin@deferred $POOL/deferred
    ok zfs destroy -d $POOL/origin@deferred
    ok zfs list -H -o name $POOL/origin@deferred
    destroy $POOL/deferred
    refused "does not exist" zfs list $POOL/origin@deferred
}

quota_below_use() {
    # 2 MiB of data that cannot be compressed
    ok dd if=/dev/urandom of="$directory/pool/clone/data" bs=65536 count=32
    sync
    ok zfs get -Hp -o value referenced $POOL/clone
    if output=$(zfs set refquota=1048576 $POOL/clone 2>&1); then
        zfs inherit refquota $POOL/clone
        skip "zfs set accepted a quota below the referenced size (writes fail instead)"
    fi
    contains "size is less than current used or reserved space" "$output"
    printf '%s\n' "$output"
}

written_since_a_snapshot() {
    need_openzfs
    ok zfs snapshot $POOL/clone@w
    [ "$(zfs get -Hp -o value written@w $POOL/clone)" = 0 ] || exit 1
    ok dd if=/dev/urandom of="$directory/pool/clone/more" bs=65536 count=4
    sync
    zpool sync $POOL
    value=$(zfs get -Hp -o value written@w $POOL/clone)
    echo "written@w=$value"
    [ "$value" -gt 0 ] || exit 1
    ok zfs destroy $POOL/clone@w
}

busy_dataset() {
    ok zfs create $POOL/busy
    (cd "$directory/pool/busy" && exec sleep 60) &
    sleeper=$!
    sleep 1
    if output=$(zfs unmount $POOL/busy 2>&1); then
        kill $sleeper
        echo "zfs unmount succeeded although a process was in the directory"
        exit 1
    fi
    kill $sleeper
    wait $sleeper 2>/dev/null
    case $output in
    *busy* | *"umount failed"*) printf '%s\n' "$output" ;;
    *)
        printf 'unexpected message: %s\n' "$output"
        exit 1
        ;;
    esac
    ok zfs unmount $POOL/busy
    destroy $POOL/busy
}

rename_keeps_properties() {
    ok zfs create -o canmount=noauto $POOL/old
    ok zfs set vfy:record=three $POOL/old
    ok zfs rename $POOL/old $POOL/renamed
    contains three "$(zfs get -Hp -o value vfy:record $POOL/renamed)"
    destroy $POOL/renamed
}

resume_a_receive() {
    need_openzfs
    zfs snapshot $POOL/clone@stream
    zfs send $POOL/clone@stream | dd bs=65536 count=16 2>/dev/null | zfs receive -s -u $POOL/received 2>/dev/null
    token=$(zfs get -Hp -o value receive_resume_token $POOL/received)
    [ "$token" != - ] || {
        echo "no resume token"
        exit 1
    }
    zfs send -t "$token" | ok zfs receive -s -u $POOL/received
    ok zfs list -H -t snapshot -o name $POOL/received
    destroy -r $POOL/received
    zfs send $POOL/clone@stream | dd bs=65536 count=16 2>/dev/null | zfs receive -s -u $POOL/received 2>/dev/null
    ok zfs receive -A $POOL/received
    refused "does not exist" zfs list $POOL/received
    destroy $POOL/clone@stream
}

change_the_pool() {
    need_openzfs
    ok zpool sync -f $POOL
    ok zpool reopen -n $POOL
    refused "checkpoint does not exist" zpool checkpoint -d $POOL
    ok zpool checkpoint $POOL
    refused "checkpoint exists" zpool checkpoint $POOL
    ok zpool checkpoint -d $POOL
}

mount_and_unmount() {
    ok zfs create $POOL/mounted
    refused "filesystem already mounted" zfs mount $POOL/mounted
    ok zfs unmount $POOL/mounted
    refused "not currently mounted" zfs unmount $POOL/mounted
    ok zfs mount $POOL/mounted
    contains yes "$(zfs get -Hp -o value mounted $POOL/mounted)"
    ok zfs unmount $POOL/mounted
    destroy $POOL/mounted
}

create_without_mounting() {
    need_openzfs
    ok zfs create -u $POOL/unmounted
    contains no "$(zfs get -Hp -o value mounted $POOL/unmounted)"
    ok zfs rename -u $POOL/unmounted $POOL/unmounted2
    destroy $POOL/unmounted2
    ok zfs create -s -V 16777216 $POOL/zvol
    contains volume "$(zfs get -Hp -o value type $POOL/zvol)"
    destroy $POOL/zvol
}

list_and_get_recursively() {
    contains vfy:own "$(ok zfs get -Hp -r -s local -o name,property,value all $POOL/clone)"
    need_openzfs
    output=$(ok zfs list -H -p -r -t filesystem -s name -o name,used $POOL) || pass_on $? "$output"
    contains $POOL/clone "$output"
    printf '%s\n' "$output"
}

roll_back() {
    ok zfs create $POOL/back
    ok zfs snapshot $POOL/back@1
    echo later >"$directory/pool/back/file"
    ok zfs snapshot $POOL/back@2
    refused "more recent snapshots" zfs rollback $POOL/back@1
    destroy $POOL/back@2
    ok zfs rollback $POOL/back@1
    [ ! -e "$directory/pool/back/file" ] || exit 1
    destroy $POOL/back@1
    ok zfs unmount $POOL/back
    destroy $POOL/back
}

promote_a_clone() {
    ok zfs create -o canmount=noauto $POOL/first
    ok zfs snapshot $POOL/first@s
    ok zfs clone -o canmount=noauto $POOL/first@s $POOL/second
    refused "not a cloned filesystem" zfs promote $POOL/first
    ok zfs promote $POOL/second
    contains $POOL/second@s "$(zfs get -Hp -o value origin $POOL/first)"
    destroy $POOL/first
    destroy $POOL/second@s
    destroy $POOL/second
}

hold_a_snapshot() {
    ok zfs snapshot $POOL/origin@held
    ok zfs hold vfy $POOL/origin@held
    message="dataset is busy"
    if [ $openzfs = yes ]; then
        contains vfy "$(zfs holds -H -p $POOL/origin@held)"
        message="it's being held"
    fi
    refused "tag already exists" zfs hold vfy $POOL/origin@held
    refused "$message" zfs destroy $POOL/origin@held
    ok zfs release vfy $POOL/origin@held
    refused "no such tag" zfs release vfy $POOL/origin@held
    destroy $POOL/origin@held
}

predict_a_destroy() {
    need_openzfs
    ok zfs snapshot $POOL/origin@predicted
    contains "$(printf 'destroy\t%s' $POOL/origin@predicted)" "$(zfs destroy -n -v -p $POOL/origin@predicted)"
    ok zfs list $POOL/origin@predicted
    destroy $POOL/origin@predicted
}

bookmark_a_base() {
    need_openzfs
    ok zfs snapshot $POOL/origin@from
    ok zfs bookmark $POOL/origin@from $POOL/origin#mark
    refused "bookmark exists" zfs bookmark $POOL/origin@from $POOL/origin#mark
    contains $POOL/origin#mark "$(zfs list -H -t bookmark -o name $POOL/origin)"
    destroy $POOL/origin@from
    ok zfs snapshot $POOL/origin@to
    contains size "$(ok zfs send -n -v -P -i $POOL/origin#mark $POOL/origin@to)"
    destroy $POOL/origin@to
    destroy $POOL/origin#mark
    refused "does not exist" zfs send -n -i $POOL/origin#mark $POOL/origin@base
}

run_a_program() {
    need_openzfs
    echo 'return 41 + 1' >"$directory/program"
    output=$(ok zfs program -n -j -t 100000 -m 1048576 $POOL "$directory/program") || pass_on $? "$output"
    contains '"return":42' "$(printf '%s' "$output" | tr -d ' \n')"
    echo 'error("vfy")' >"$directory/program"
    refused "Channel program execution failed" zfs program -n $POOL "$directory/program"
}

send_an_increment() {
    ok zfs create -o canmount=noauto $POOL/source
    ok zfs snapshot $POOL/source@1
    ok zfs snapshot $POOL/source@2
    zfs send $POOL/source@1 | ok zfs receive -u $POOL/target || exit $?
    zfs send -i @1 $POOL/source@2 | ok zfs receive -u $POOL/target || exit $?
    zfs send $POOL/source@1 >"$directory/stream" || exit 1
    refused "exists" zfs receive -u $POOL/target@1 <"$directory/stream"
    ok zfs list -H -o name $POOL/target@2
    zfs send -i @1 $POOL/source@2 >"$directory/stream" || exit 1
    destroy $POOL/target@2
    ok zfs set vfy:changed=yes $POOL/target
    ok zfs receive -F -u $POOL/target <"$directory/stream"
    for name in target source; do
        destroy $POOL/$name@2
        destroy $POOL/$name@1
        destroy $POOL/$name
    done
}

send_with_options() {
    need_openzfs
    ok zfs snapshot $POOL/clone@options
    contains size "$(ok zfs send -e -L -c -n -v -P $POOL/clone@options)"
    zfs send -e -L -c $POOL/clone@options >"$directory/stream" || exit 1
    ok zfs receive -u -o vfy:received=yes -x vfy:own $POOL/received <"$directory/stream"
    contains yes "$(zfs get -Hp -o value vfy:received $POOL/received)"
    # Nothing is damaged, so nothing changes.
    ok zfs receive -c $POOL/received@options <"$directory/stream"
    destroy -r $POOL/received
    zfs send -w $POOL/clone@options | ok zfs receive -u $POOL/received || exit $?
    destroy -r $POOL/received
    zfs send -i $POOL/origin@base $POOL/clone@options >"$directory/stream" || exit 1
    ok zfs receive -u -o origin=$POOL/origin@base $POOL/received <"$directory/stream"
    contains $POOL/origin@base "$(zfs get -Hp -o value origin $POOL/received)"
    destroy -r $POOL/received
    destroy $POOL/clone@options
    refused "does not exist" zfs send $POOL/clone@options
}

# -- kernel values ---------------------------------------------------------------------------------------------------

read_memory() {
    output=$(ok sysctl -ie hw.physmem hw.pagesize vm.stats.vm.v_free_count vm.stats.vm.v_inactive_count vfy.unknown \
        kstat.zfs.misc.arcstats.size kstat.zfs.misc.arcstats.c_min) || pass_on $? "$output"
    for name in hw.physmem hw.pagesize vm.stats.vm.v_free_count vm.stats.vm.v_inactive_count; do
        contains "$name=" "$output"
    done
    [ $on_freebsd = no ] || contains "arcstats.c_min=" "$output"
    printf '%s\n' "$output"
}

read_linux_feature() {
    expected=
    if [ $on_freebsd = yes ] && kldstat -q -m linux64elf; then
        expected=kern.features.linux64=1
    fi
    output=$(ok sysctl -ie kern.features.linux64) || pass_on $? "$output"
    [ "$output" = "$expected" ] || {
        echo "expected '$expected', got '$output'"
        exit 1
    }
    printf '%s\n' "$output"
}

read_boot_id() {
    need_freebsd
    value=$(sysctl -inx kern.boot_id)
    contains Dump:0x "$value"
    [ "$value" = "$(sysctl -inx kern.boot_id)" ] || exit 1
    printf '%s\n' "$value"
}

read_start_time() {
    need_freebsd
    value=$(ps -o lstart= -p $$)
    [ -n "$value" ] || exit 1
    printf '%s\n' "$value"
}

unknown_sysctl() {
    refused "unknown oid" sysctl -n vfy.unknown
}

# -- network ---------------------------------------------------------------------------------------------------------

create_bridge() {
    [ $on_freebsd = no ] || kldload -n if_bridge if_epair nullfs
    ok ifconfig bridge create name $BRIDGE
    ok ifconfig $BRIDGE ether 58:9c:fc:00:77:01
    ok ifconfig $BRIDGE inet $NETWORK.1/24 staticarp up
    output=$(ifconfig $BRIDGE)
    contains "inet $NETWORK.1 netmask 0xffffff00" "$output"
    contains STATICARP "$output"
    contains $BRIDGE "$(ifconfig -l)"
    # once more without the address, as for an existing bridge
    ok ifconfig $BRIDGE staticarp up
    ok sysctl -n net.link.bridge.pfil_member
    ok sysctl -n net.link.bridge.pfil_local_phys
    # The value stays the same.
    ok sysctl net.link.bridge.pfil_member="$(sysctl -n net.link.bridge.pfil_member)"
}

empty_group() {
    # No message; the exit status does not matter.
    output=$(ifconfig -g vfy-none 2>&1)
    [ -z "$output" ] || {
        printf '%s\n' "$output"
        exit 1
    }
}

create_epair() {
    name=$(ok ifconfig epair create group $GROUP) || pass_on $? "$name"
    echo "$name"
    case $name in
    epair*a) ;;
    *) exit 1 ;;
    esac
    ok ifconfig "$name" name $OUTER up
    ok ifconfig "${name%a}b" ether $MAC name $INNER
    [ "$(ifconfig -g $GROUP)" = $OUTER ] || {
        echo "the group has the members $(ifconfig -g $GROUP)"
        exit 1
    }
    ok ifconfig $BRIDGE addm $OUTER private $OUTER -learn $OUTER -discover $OUTER static $OUTER $MAC
    contains "member: $OUTER " "$(ifconfig $BRIDGE)"
    # once more without addm, as for an adopted jail
    ok ifconfig $BRIDGE private $OUTER -learn $OUTER -discover $OUTER static $OUTER $MAC
}

permanent_arp_entry() {
    ok arp -S $NETWORK.2 $MAC
    output=$(arp -n -i $BRIDGE -a)
    contains "($NETWORK.2) at $MAC " "$output"
    printf '%s\n' "$output"
}

missing_arp_entry() {
    output=$(arp -d $NETWORK.99 2>&1) && { echo "arp -d succeeded"; exit 1; }
    case $output in
    *"No such file or directory"* | *"cannot locate"*) printf '%s\n' "$output" ;;
    *)
        printf 'unexpected message: %s\n' "$output"
        exit 1
        ;;
    esac
}

missing_interface() {
    refused "does not exist" ifconfig vfy-99a destroy
}

default_route() {
    if output=$(route -n get default 2>&1); then
        contains "interface:" "$output"
        printf '%s\n' "$output" | sed -n 's/^ *//; /interface/p'
        return
    fi
    case $output in
    *"not been found"* | *"not in table"*) printf '%s\n' "$output" ;;
    *)
        printf 'unexpected message: %s\n' "$output"
        exit 1
        ;;
    esac
}

# -- templates -------------------------------------------------------------------------------------------------------

copy_a_tree() {
    ok mkdir -p "$directory/tree/dev" "$directory/copy" "$directory/unpacked"
    echo kept >"$directory/tree/file"
    echo excluded >"$directory/tree/dev/null"
    ok cp -a -x "$directory/tree/." "$directory/copy/"
    contains kept "$(cat "$directory/copy/file")"
    ok tar -c -f "$directory/tree.tar" -C "$directory/tree" .
    ok tar -x -p -f "$directory/tree.tar" -C "$directory/unpacked" --numeric-owner '--exclude=./dev/*' '--exclude=dev/*'
    contains kept "$(cat "$directory/unpacked/file")"
    [ ! -e "$directory/unpacked/dev/null" ] || exit 1
}

add_a_user() {
    need_freebsd
    ok mkdir -p "$directory/users/etc"
    ok cp /etc/master.passwd /etc/group "$directory/users/etc"
    ok pwd_mkdb -d "$directory/users/etc" "$directory/users/etc/master.passwd"
    ok pw -R "$directory/users" useradd user -u 31000 -d /home/user -s /bin/sh -C /dev/null
    contains user:31000 "$(cut -d : -f 1,3 "$directory/users/etc/master.passwd")"
}

install_a_package() {
    need_freebsd
    pkg -N >/dev/null 2>&1 || skip "pkg is not installed"
    ok mkdir -p "$directory/packages/etc"
    ok cp -a -x /etc/pkg "$directory/packages/etc/"
    output=$(pkg -r "$directory/packages" install -y vfy-missing 2>&1) && { echo "pkg found vfy-missing"; exit 1; }
    case $output in
    *"No packages available to install matching"*) printf '%s\n' "$output" ;;
    *"llegal option"* | *[Uu]sage*)
        printf 'unexpected message: %s\n' "$output"
        exit 1
        ;;
    *) skip "the repository cannot be read: $output" ;;
    esac
}

# -- jails -----------------------------------------------------------------------------------------------------------

mount_userland() {
    for name in bin lib libexec sbin usr; do
        if [ -h /$name ]; then
            ok ln -s "usr/$name" "$root/$name"
        elif [ -d /$name ]; then
            ok mkdir -p "$root/$name"
            ok mount -t nullfs -o ro,nosuid,nocover /$name "$root/$name"
        fi
    done
    [ ! -h /lib64 ] || ok ln -s usr/lib64 "$root/lib64"
    printf 'root:*:0:0::0:0:root:/root:/bin/sh\n' >"$root/etc/master.passwd"
    printf 'root:*:0:0:root:/root:/bin/sh\n' >"$root/etc/passwd"
    [ $on_freebsd = no ] || ok pwd_mkdb -d "$root/etc" "$root/etc/master.passwd"
    ok ls "$root/bin/sh"
}

# Create the jail $1. $2: a line of fstab(5). $3: an interface.
create_jail() {
    ok jail -c name="$1" path="$root" vnet=new host.hostname="$1" ${2:+mount="$2"} mount.devfs devfs_ruleset=4 \
        enforce_statfs=2 securelevel=2 children.max=0 allow.noset_hostname allow.noraw_sockets \
        ${3:+vnet.interface=$3} exec.clean exec.start='(sleep 600; kill -KILL -1) </dev/null >/dev/null 2>&1 &'
}

start_a_jail() {
    ok mkdir -p "$directory/identity" "$root/mnt"
    echo hello >"$directory/identity/file"
    create_jail $JAIL "$directory/identity $root/mnt nullfs ro,nosuid 0 0" $INNER
    contains hello "$(cat "$root/mnt/file")"
    output=$(ok jls --libxo json -d name path dying) || pass_on $? "$output"
    contains '"jail-information"' "$output"
    contains "\"name\":\"$JAIL\"" "$output"
    contains "\"path\":\"$root\"" "$output"
    contains '"dying":"false"' "$output"
    printf '%s\n' "$output"
}

jail_exists_without_persist() {
    need_freebsd
    ok jls -j $JAIL -n persist enforce_statfs securelevel children.max allow.set_hostname allow.raw_sockets devfs_ruleset
    output=$(jls -j $JAIL -n)
    for value in nopersist enforce_statfs=2 securelevel=2 children.max=0 allow.noset_hostname allow.noraw_sockets \
        devfs_ruleset=4; do
        contains "$value" "$output"
    done
}

interface_moves_into_the_jail() {
    lacks " $INNER " " $(ifconfig -l) "
    ok ifconfig -j $JAIL lo0 inet 127.0.0.1/8 up
    ok ifconfig -j $JAIL $INNER inet $NETWORK.2/24 up
    ok route -n -j $JAIL add default $NETWORK.1
    contains $OUTER "$(ifconfig -g $GROUP)"
}

packets_reach_the_jail() {
    need_freebsd
    ok ping -c 1 -t 5 $NETWORK.2
}

confinement() {
    need_freebsd
    refused "Operation not permitted" jexec $JAIL hostname other
    ok jexec $JAIL ls /dev/null
    refused "No such file" jexec $JAIL ls /dev/mem
    refused "Operation not permitted" jexec $JAIL mount -t nullfs /bin /vol
}

name_is_taken() {
    refused "already exists" jail -c name=$JAIL path="$root" vnet=new persist
}

missing_jail() {
    refused "not found" jail -R vfy-none
    output=$(pkill -KILL -j vfy-none 2>&1)
    case $output in
    *"not found"* | *"Invalid jail ID or name"*) printf '%s\n' "$output" ;;
    *)
        printf 'unexpected message of pkill: %s\n' "$output"
        exit 1
        ;;
    esac
}

stop_and_continue_processes() {
    ok pkill -STOP -j $JAIL
    if [ $on_freebsd = yes ]; then
        states=$(ps -J $JAIL -o state=)
        case $states in
        *T*) printf 'states: %s\n' "$(echo "$states" | tr '\n' ' ')" ;;
        *)
            printf 'not stopped: %s\n' "$states"
            exit 1
            ;;
        esac
    fi
    ok pkill -CONT -j $JAIL
}

limits() {
    [ "$(sysctl -n kern.racct.enable 2>/dev/null)" = 1 ] || skip "kern.racct.enable is not 1"
    ok rctl -a jail:$JAIL:maxproc:deny=50 jail:$JAIL:nthr:deny=200 jail:$JAIL:openfiles:deny=10000 \
        jail:$JAIL:vmemoryuse:deny=268435456 jail:$JAIL:pcpu:deny=100
    output=$(rctl)
    for resource in maxproc nthr openfiles vmemoryuse pcpu; do
        contains "jail:$JAIL:$resource:deny=" "$output"
    done
    output=$(rctl -u jail:$JAIL)
    for resource in memoryuse pcpu maxproc; do
        contains "$resource=" "$output"
    done
    two=$(rctl -u jail:$JAIL jail:$JAIL | grep -c '^memoryuse=')
    echo "usage of two jails: $two blocks"
    [ "$two" = 2 ] || exit 1
    ok rctl -r jail:$JAIL
    refused "No such process" rctl -r jail:$JAIL
}

# -- volumes ---------------------------------------------------------------------------------------------------------

mount_a_volume() {
    ok zfs create $POOL/volume
    ok mount -t nullfs -o rw,nosuid,nocover "$directory/pool/volume" "$root/vol"
    output=$(ok mount --libxo json -v) || pass_on $? "$output"
    contains "\"special\":\"$directory/pool/volume\"" "$output"
    contains "\"node\":\"$root/vol\"" "$output"
    contains '"fsid":"' "$output"
    echo data >"$root/vol/file"
    contains data "$(cat "$directory/pool/volume/file")"
    refused "Device busy" mount -t nullfs -o rw,nosuid,nocover "$directory/pool/volume" "$root/vol"
}

mount_through_a_link() {
    ok mkdir -p "$directory/pool/volume/target"
    ok ln -s "$directory/pool/volume/target" "$root/link"
    ok mount -t nullfs -o ro,nosuid,nocover "$directory/pool/volume" "$root/link"
    output=$(mount --libxo json -v)
    lacks "\"node\":\"$root/link\"" "$output"
    contains "\"node\":\"$directory/pool/volume/target\"" "$output"
    ok umount "$directory/pool/volume/target"
    ok rm "$root/link"
}

# Print the file system id of the mount at $1.
fsid_of() {
    mount --libxo json -v | tr '{' '\n' | sed -n "s,.*\"node\":\"$1\".*\"fsid\":\"\\([0-9a-f]*\\)\".*,\\1,p"
}

processes_of_a_file_system() {
    (cd "$root/vol" && exec sleep 60) &
    sleeper=$!
    sleep 1
    output=$(fstat -f "$root/vol" 2>&1)
    kill $sleeper
    wait $sleeper 2>/dev/null
    skip_if_unsupported "$output"
    contains "$sleeper" "$output"
    printf '%s\n' "$output" | grep sleep
}

unmount_by_id() {
    id=$(fsid_of "$root/vol")
    echo "fsid $id"
    [ ${#id} -eq 16 ] || exit 1
    ok umount "$id"
    output=$(umount "$id" 2>&1) && { echo "a second umount succeeded"; exit 1; }
    case $output in
    *"not a file system root directory"* | *"unknown file system"*) printf '%s\n' "$output" ;;
    *)
        printf 'unexpected message: %s\n' "$output"
        exit 1
        ;;
    esac
}

unmount_by_force() {
    ok mount -t nullfs -o ro,nosuid,nocover "$directory/pool/volume" "$root/vol"
    (cd "$root/vol" && exec sleep 60) &
    sleeper=$!
    sleep 1
    refused "busy" umount "$root/vol"
    ok umount -f "$(fsid_of "$root/vol")"
    kill $sleeper
    wait $sleeper 2>/dev/null
    [ -z "$(fsid_of "$root/vol")" ] || exit 1
}

# -- pf --------------------------------------------------------------------------------------------------------------

pf_rules() {
    cat <<RULES
block drop in quick on $OUTER inet from ! $NETWORK.2 to any
block drop in quick on $OUTER inet6 all
pass out quick on $BRIDGE inet from $NETWORK.1 to $NETWORK.2
block return in quick on $OUTER inet from $NETWORK.2 to (self)
block return in quick on $OUTER inet from $NETWORK.2 to 255.255.255.255
pass in quick on $OUTER inet proto udp from $NETWORK.2 to 9.9.9.9 port 53 keep state (source-track global, max-src-states 4096)
pass in quick on $OUTER inet from $NETWORK.2 to any keep state (source-track global, max-src-states 4096)
block drop on $BRIDGE all
RULES
}

load_pf_rules() {
    output=$(pfctl -s info 2>&1) || skip "pf is not loaded: $output"
    pf_rules | ok pfctl -q -a $ANCHOR -f -
    contains vfy-a "$(pfctl -a sbx -s Anchors)"
    ok pfctl -a $ANCHOR -s rules
    ok pfctl -s rules
    ok pfctl -s nat
    ok pfctl -q -k $NETWORK.2
    ok pfctl -q -k 0.0.0.0/0 -k $NETWORK.2
    ok pfctl -q -a $ANCHOR -F all
}

# -- removal ---------------------------------------------------------------------------------------------------------

jail_ends_with_its_processes() {
    ok pkill -KILL -j $JAIL
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        case $(jls -d name 2>/dev/null) in
        *$JAIL*) sleep 1 ;;
        *)
            echo "the jail ended with its last process"
            return
            ;;
        esac
    done
    ok jls -d name dying
    jls name | grep -q "^$JAIL\$" && exit 1
    echo "the jail is dying"
}

interface_returns() {
    contains " $INNER " " $(ifconfig -l) "
    output=$(ifconfig $INNER -vnet $JAIL 2>&1) && { echo "-vnet succeeded"; exit 1; }
    printf '%s\n' "$output"
    case $output in
    *"Device not configured"* | *"does not exist"* | *"not found"* | *"Invalid jail ID or name"*) ;;
    *) exit 1 ;;
    esac
}

mounts_remain() {
    output=$(mount --libxo json -v)
    contains "\"node\":\"$root/dev\"" "$output"
    contains "\"node\":\"$root/mnt\"" "$output"
    ok umount "$(fsid_of "$root/mnt")"
    ok umount "$(fsid_of "$root/dev")"
}

both_ends_are_destroyed() {
    create_jail vfy-b "" $INNER
    ok ifconfig $OUTER destroy
    lacks $INNER "$(ifconfig -j vfy-b -l 2>/dev/null)"
    lacks " $OUTER " " $(ifconfig -l) "
    ok jail -R vfy-b
    ok umount "$(fsid_of "$root/dev")"
}

destroy_bridge() {
    ok arp -d $NETWORK.2
    ok ifconfig $BRIDGE destroy
}

# -- the report ------------------------------------------------------------------------------------------------------

echo "$(uname -srm), $(zfs version 2>/dev/null | head -n 1 || true), $(date -u +%Y-%m-%dT%H:%MZ)"
truncate -s 512M "$directory/disk" || exit 2
if [ $on_freebsd = yes ]; then
    disk=$(mdconfig -a -t vnode -f "$directory/disk") || exit 2
    zpool create -m "$directory/pool" $POOL "$disk" || exit 2
else
    zpool create -m "$directory/pool" $POOL "$directory/disk" || exit 2
fi

check "zfs snapshot -o: a snapshot with a property" create_pool
check "zfs clone -o: a clone inherits no user property" clone_with_properties
check "zfs snapshot: several snapshots, all or none" take_several_snapshots
check "zfs destroy: refused for a cloned snapshot" refuse_to_destroy_a_cloned_snapshot
check "zfs destroy: the message for a missing dataset" refuse_to_destroy_a_missing_dataset
check "zfs destroy -d: hidden until the last clone is gone" deferred_destroy
check "zfs set refquota: refused below the current use" quota_below_use
check "zfs get written@: changes since a snapshot" written_since_a_snapshot
check "zfs unmount: the message for a busy dataset" busy_dataset
check "zfs rename: keeps properties" rename_keeps_properties
check "zfs receive -s, -A: resumes, or removes what arrived" resume_a_receive
check "zpool sync, reopen, checkpoint" change_the_pool
check "zfs mount, zfs unmount: the messages" mount_and_unmount
check "zfs create -u, -s, -V, zfs rename -u" create_without_mounting
check "zfs get -r -s, zfs list -r -p" list_and_get_recursively
check "zfs rollback: refused with newer snapshots" roll_back
check "zfs promote" promote_a_clone
check "zfs hold, holds, release" hold_a_snapshot
check "zfs destroy -n -v -p: predicts" predict_a_destroy
check "zfs bookmark: the base of an increment" bookmark_a_base
check "zfs program -n -j -t -m" run_a_program
check "zfs send -i, zfs receive -F" send_an_increment
check "zfs send -e -L -c -w, zfs receive -o -x -c, -o origin" send_with_options
check "sysctl -ie: memory, and unknown names are ignored" read_memory
check "sysctl -n: the message for an unknown name" unknown_sysctl
check "sysctl -ie: kern.features.linux64 exists only with linux(4)" read_linux_feature
check "sysctl -inx kern.boot_id" read_boot_id
check "ps -o lstart=" read_start_time
check "ifconfig bridge create, staticarp" create_bridge
check "ifconfig -g: nothing for an empty group" empty_group
check "ifconfig epair create group, addm, private, static" create_epair
check "arp -S, arp -n -i -a" permanent_arp_entry
check "arp -d: the message for a missing entry" missing_arp_entry
check "ifconfig destroy: the message for a missing interface" missing_interface
check "route -n get default" default_route
check "cp -a -x, tar -x: the tree of a template" copy_a_tree
check "pw useradd" add_a_user
check "pkg install: the message for a missing package" install_a_package
check "mount -t nullfs: the userland of the jail" mount_userland
check "jail -c, jls --libxo json" start_a_jail
check "jls: the parameters of the jail" jail_exists_without_persist
check "vnet.interface, ifconfig -j, route -j" interface_moves_into_the_jail
check "packets from the host to the jail" packets_reach_the_jail
check "the jail can neither mount, nor set its host name" confinement
check "jail -c: the message for a name that is taken" name_is_taken
check "jail -R, pkill -j: the messages for a missing jail" missing_jail
check "pkill -STOP, pkill -CONT" stop_and_continue_processes
check "rctl -a, -u, -r" limits
check "mount -t nullfs -o nocover, mount --libxo json -v" mount_a_volume
check "mount -t nullfs: the mount table shows redirected mounts" mount_through_a_link
check "fstat -f" processes_of_a_file_system
check "umount FSID" unmount_by_id
check "umount -f FSID" unmount_by_force
check "pfctl -a -f -, -s Anchors, -k, -F all" load_pf_rules
check "pkill -KILL: the jail ends with its last process" jail_ends_with_its_processes
check "the interface returns to the host" interface_returns
check "the mounts of a removed jail remain" mounts_remain
check "ifconfig destroy: also destroys the end in a jail" both_ends_are_destroyed
check "arp -d, ifconfig destroy" destroy_bridge

echo "$counts_ok ok, $counts_failed failed, $counts_skipped skipped"
[ $counts_failed -eq 0 ]
