#!/bin/bash
# Runs in the virtual machine after init: the network, SoftRoCE, then every script that appears in its folder of /share.
#
# eth0 carries RDMA and nothing else, so `ip link set eth0 down` is a fault of RDMA alone. TCP has addresses of its own: of
# dummy0 or, between two machines, of eth1. eth0 and eth1 are on top of the devices of QEMU, which stay up: a device that
# is down would make the other machine wait, while a network drops its packets.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
id=$(sed -E 's/.*machine=([0-9]+).*/\1/' /proc/cmdline)
mkdir -p /dev/shm /dev/pts /run
mount -t tmpfs shm /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs run /run
hostname "machine$id"
ulimit -l unlimited
ip link set lo up
for name in eth0 eth1; do
    [[ -e /sys/class/net/$name ]] || continue
    ip link set "$name" name "wire-$name"
    ip link set "wire-$name" up
    ip link add link "wire-$name" name "$name" type macvlan mode private
done
ip addr add "10.9.0.$id/24" dev eth0
ip link set eth0 up
if [[ -e /sys/class/net/eth1 ]]; then
    tcp=eth1
else
    tcp=dummy0  # made by the module
fi
ip addr add "10.8.0.$id/24" dev "$tcp"
ip link set "$tcp" up
rdma link add rxe0 type rxe netdev eth0 || echo "no SoftRoCE"
cd "/share/$id" || exit 1
cat /sys/class/infiniband/rxe0/ports/1/state >up.new
mv up.new up
while true; do
    for script in ./*.sh; do
        [[ -e $script ]] || continue
        name=$(basename "$script" .sh)
        mv "$script" "$name.script"
        (
            bash "$name.script" >"$name.log" 2>&1 </dev/null
            echo $? >"$name.rc.new"
            mv "$name.rc.new" "$name.rc"
        ) &
    done
    sleep 0.3
done
