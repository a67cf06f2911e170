#!/usr/bin/env bash
# Starts SLURM on this machine for as long as one command runs: munge, a controller and two "nodes" that are both this machine,
# all in a directory of their own. Needs root (or the rights of the user slurmd runs as) and Debian's slurm-wlm and munge.
#
#   deploy/try-slurm.sh srun -N 2 -n 4 lockstep train run.toml
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 2; }
for program in munged slurmctld slurmd srun; do
  PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || { echo "no $program: apt-get install slurm-wlm munge" >&2; exit 3; }
done
export PATH=$PATH:/usr/sbin

dir=$(mktemp -d /tmp/lockstep-slurm.XXXXXX)
chmod 755 "$dir"
pids=()
stop() {
  # Only what was started here, by its id; slurmd waits for a controller that may be gone.
  kill "${pids[@]}" 2>/dev/null || true
  for _ in $(seq 20); do kill -0 "${pids[@]}" 2>/dev/null || break; sleep 0.1; done
  kill -9 "${pids[@]}" 2>/dev/null || true
  wait "${pids[@]}" 2>/dev/null || true
  if [ -n "${KEEP:-}" ]; then echo "logs are in $dir" >&2; else rm -rf "$dir"; fi
}
trap stop EXIT

mkdir "$dir/cgroup" "$dir/munge" "$dir/spool" "$dir/state"
head -c 128 /dev/urandom >"$dir/munge/key"
chmod 700 "$dir/munge"; chmod 600 "$dir/munge/key"
munged --foreground --force --num-threads=2 --key-file="$dir/munge/key" --socket="$dir/munge.socket" \
  --pid-file="$dir/munge/pid" --seed-file="$dir/munge/seed" --log-file="$dir/munge.log" 2>/dev/null &
pids+=($!)

# Nodes are named by addresses of this machine, so that they find each other by name.
port=$((20000 + RANDOM % 20000))
host=$(hostname -s)
cat >"$dir/slurm.conf" <<CONF
ClusterName=scratch
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
SlurmctldPort=$port
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
# No cgroups, no accounting, no binding to cores: nothing but starting and ending processes.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=127.0.0.[1-2] NodeHostname=$host Port=[$((port + 1))-$((port + 2))] CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
CONF
printf "CgroupPlugin=cgroup/v1\nCgroupMountpoint=%s/cgroup\nCgroupAutomount=no\n" "$dir" >"$dir/cgroup.conf"
export SLURM_CONF=$dir/slurm.conf

for _ in $(seq 50); do [ -S "$dir/munge.socket" ] && break; sleep 0.1; done
slurmctld -D -c -f "$SLURM_CONF" >/dev/null 2>&1 &
pids+=($!)
for node in 127.0.0.1 127.0.0.2; do
  mkdir "$dir/spool/$node"
  slurmd -D -c -N "$node" -f "$SLURM_CONF" >/dev/null 2>&1 &
  pids+=($!)
done
for _ in $(seq 100); do
  [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 2 ] && break
  for pid in "${pids[@]}"; do
    kill -0 "$pid" 2>/dev/null || { tail -n 20 "$dir"/*.log >&2; echo "SLURM did not start" >&2; exit 1; }
  done
  sleep 0.2
done
sinfo -h -o "SLURM: %D nodes %t" >&2
code=0
"$@" || code=$?
exit "$code"
