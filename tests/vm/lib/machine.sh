# Boots the virtual machine, runs a job in it and says how it ended.
# Sourced by tests/vm/run.
#
# Promises: QEMU and virtiofsd end with the run; a time limit ends everything; a boot that dies
# before the job begins is tried twice more, and so is a job in which the emulator made a mistake; a
# complaint of the guest's kernel fails a run whose job succeeded.
# Variables of tests/vm/run and fetch.sh; words of QEMU have commas.
# shellcheck shell=bash disable=SC2154,SC2054

# Two nodes of two CPUs: sockets, because Linux objects to nodes within one socket.
cpus=4
node_mib=1536
# More than any boot takes, also on a busy machine (about 10 s are usual).
boot_limit_s=120
# The debug kernel is several times as slow, and notes all of its memory down.
if [ "$kernel_wanted" = debug ]; then node_mib=2560 boot_limit_s=600; fi
# What of the kernel's log means that something went wrong. A soft lockup or RCU stall needs minutes
# here (see the command line): what looks like one is not just a busy host.
complaints='WARNING:|BUG:|Oops|Kernel panic|INFO: task .* blocked for more than|INFO: rcu'
complaints+='|general protection fault|unable to handle|refcount_t:|UBSAN:|ODEBUG:'
complaints+='|possible recursive locking|possible circular locking|inconsistent lock state'

# What is a mistake of the emulator. Linux changes its own code while other CPUs run it (static
# keys, modules that are loaded), with a breakpoint in its place meanwhile; QEMU's emulation of
# several CPUs runs into one, now and then, that is gone.
slips='Oops: int3'

# slipped CONSOLE: there is such a mistake, and none with our module in its trace: a jump astray
# between two functions also meets a breakpoint.
slipped() {
  grep -aqE "$slips" "$1" && ! grep -aE -A 80 "$slips" "$1" | grep -a '\[vhost' >/dev/null
}

qemu_pid='' virtiofsd_pid='' reader_pid=''

# accelerator: emulation unless told otherwise. It shows the same on every host; and there are hosts
# whose /dev/kvm does not boot Linux.
accelerator() { echo "${RINGDISK_VM_ACCEL:-tcg,thread=multi,tb-size=512}"; }

# processor: of Linux 6.12 the allocator uses cmpxchg16b in a way that QEMU 7.2 emulates wrongly (a
# double fault in the first programs).
processor() {
  local words=max,arch-capabilities=off
  if [[ $kernel_wanted == 6.* ]]; then words+=,-cx16; fi
  echo "$words"
}

# The initramfs: busybox, /init, and the two modules that the root file system takes.
make_initramfs() {
  local tree=$1/tree version each modules
  version=$(cat "$kernel_dir/version")
  mkdir -p "$tree"/{bin,dev,proc,sys,modules}
  cp "$busybox" "$tree/bin/busybox" && cp "$here/guest/init" "$tree/init" || return
  modules=$kernel_dir/modules/lib/modules/$version/kernel
  for each in drivers/block/virtio_blk fs/overlayfs/overlay; do
    "$busybox" unxz -c "$modules/$each.ko.xz" >"$tree/modules/${each##*/}.ko" || return
  done
  (cd "$tree" && find . | "$busybox" cpio -o -H newc) >"$1/initramfs" 2>/dev/null
}

stop_processes() {
  local each
  for each in $qemu_pid $virtiofsd_pid; do
    kill -9 "$each" 2>/dev/null
    wait "$each" 2>/dev/null
  done
  # The reader has all of the output once QEMU is gone; where QEMU never opened the pipe it has to
  # be ended.
  if [ -n "$reader_pid" ]; then
    for _ in {1..20}; do kill -0 "$reader_pid" 2>/dev/null || break; sleep 0.05; done
    kill "$reader_pid" 2>/dev/null
    wait "$reader_pid" 2>/dev/null
  fi
  qemu_pid='' virtiofsd_pid='' reader_pid=''
}

start_virtiofsd() {
  local socket=$1/socket words
  if "$virtiofsd" --help 2>&1 | grep -e --shared-dir >/dev/null; then
    words=(--shared-dir / --sandbox chroot --cache always --socket-path "$socket")
  else
    words=(-f -o "source=/,sandbox=chroot,cache=always" --socket-path="$socket")
  fi
  rm -f "$socket"
  "$virtiofsd" "${words[@]}" >"$1/virtiofsd.log" 2>&1 </dev/null &
  virtiofsd_pid=$!
  for _ in {1..100}; do
    [ -S "$socket" ] && return
    kill -0 "$virtiofsd_pid" 2>/dev/null || break
    sleep 0.05
  done
  cat "$1/virtiofsd.log"
  return 1
}

# start_qemu RUN: the machine. What its output port gets is copied to our standard output.
start_qemu() {
  local run=$1 console=(-device "virtserialport,chardev=out,name=out") append
  # tsc=reliable: emulated CPUs share the host's clock, and Linux would fall back to a slow timer.
  # no_timer_check: Linux counts the timer's interrupts over a few ms and panics ("IO-APIC + timer
  # doesn't work!") where a busy host has no time for the machine just then.
  append="console=ttyS0 loglevel=5 panic=-1 tsc=reliable no_timer_check mitigations=off"
  append+=" random.trust_cpu=on hung_task_timeout_secs=100 watchdog_thresh=60"
  append+=" rcupdate.rcu_cpu_stall_timeout=120 rdinit=/init"
  # Arrays of free objects for each CPU keep addresses of what was taken from them: kmemleak saw no
  # leak of a small object. Caches whose objects are checked have no such arrays.
  if [ "$kernel_wanted" = debug ]; then append+=" slab_debug=F,kmalloc-*"; fi
  append+=" ringdisk.run=$run ringdisk.modules=$kernel_dir/modules ringdisk.writable=${writable:-}"
  local memory="memory-backend-memfd,size=${node_mib}M,share=on"
  local words=(
    -nodefaults -no-user-config -display none -no-reboot -machine q35,sata=off,smbus=off
    -cpu "${RINGDISK_VM_CPU:-$(processor)}"
    -accel "$(accelerator)"
    -smp "$cpus,sockets=2,cores=$((cpus / 2))" -m "$((2 * node_mib))M"
    -object "$memory,id=m0" -object "$memory,id=m1"
    -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1
    -numa dist,src=0,dst=1,val=21
    -kernel "$kernel_dir/vmlinuz" -initrd "$run/initramfs" -append "$append"
    -chardev "file,id=console,path=$run/console" -serial chardev:console
    -chardev "socket,id=host,path=$run/socket"
    -device vhost-user-fs-pci,chardev=host,tag=host,queue-size=1024
    -drive "file=$run/disk,format=raw,if=none,id=disk,cache=unsafe,discard=unmap"
    -device virtio-blk-pci,drive=disk
    -chardev "file,id=status,path=$run/status" -chardev "file,id=out,path=$run/out"
    -device virtio-serial-pci -device virtserialport,chardev=status,name=status "${console[@]}" )
  # shellcheck disable=SC2206 # words, split at blanks
  words+=(${RINGDISK_VM_QEMU:-})
  # A named pipe, since our standard output may be something that cannot be opened by a path (a
  # socket).
  rm -f "$run/out" && mkfifo "$run/out" || return
  cat "$run/out" &
  reader_pid=$!
  "$qemu" "${words[@]}" </dev/null >/dev/null 2>"$run/qemu.log" &
  qemu_pid=$!
}

# boot RUN LIMIT_S: one boot. 0: the job ended (its exit status is in $job_code); 1: it began and
# did not end; 2: it never began.
boot() {
  local run=$1 limit_s=$2 begin=$SECONDS
  job_code=
  : >"$run/status"
  : >"$run/console"
  rm -f "$run/disk"
  truncate -s 16G "$run/disk" || return 2
  PATH=$PATH:/sbin:/usr/sbin mkfs.ext4 -q -F -E nodiscard -O ^has_journal "$run/disk" || return 2
  start_virtiofsd "$run" || return 2
  start_qemu "$run"
  while kill -0 "$qemu_pid" 2>/dev/null; do
    if ! grep -q started "$run/status" && [ $((SECONDS - begin)) -gt $boot_limit_s ]; then
      echo "vm: not booted within $boot_limit_s s" >&2; break
    fi
    if [ $((SECONDS - begin)) -gt "$limit_s" ]; then
      echo "vm: the job did not end within $limit_s s" >&2; break
    fi
    # What the job waits for may never come then.
    if [ $((SECONDS % 10)) -eq 0 ] && slipped "$run/console"; then break; fi
    sleep 0.2
  done
  stop_processes
  job_code=$(awk '$1 == "exit" {print $2}' "$run/status")
  [ -n "$job_code" ] && return 0
  grep -q started "$run/status" && return 1
  return 2
}

# machine RUN LIMIT_S: runs $run/job. The exit status is the job's; 125 when the machine failed, 126
# when its kernel complained.
machine() {
  local run=$1 limit_s=$2 attempt code
  cp "$here/guest/start" "$run/start"
  make_initramfs "$run" || { echo "vm: no initramfs" >&2; return 125; }
  for attempt in 1 2 3; do
    boot "$run" "$limit_s"
    code=$?
    if [ $code -eq 2 ]; then
      echo "vm: the machine died before the job began (attempt $attempt);" \
        "the end of its console:" >&2
      # What it died of stands before a long trace.
      grep -aE -A 3 "$complaints" "$run/console" | head -n 12 >&2
      tail -n 15 "$run/console" "$run/qemu.log" >&2
    elif [ $attempt -lt 3 ] && slipped "$run/console"; then
      # tests/tally knows this line: what was counted so far is counted again.
      echo "vm: the job begins anew: the emulator made a mistake:" >&2
      grep -aE -A 3 "$slips" "$run/console" | head -n 8 >&2
    else
      break
    fi
  done
  if grep -aqE "$complaints" "$run/console"; then
    echo "vm: the guest's kernel complained:" >&2
    grep -aE -A 40 "$complaints" "$run/console" | head -n 120 >&2
    return 126
  fi
  [ $code -eq 0 ] && return "$job_code"
  if [ $code -eq 1 ]; then
    echo "vm: the job began and did not end; the end of the console:" >&2
    tail -n 30 "$run/console" >&2
  fi
  return 125
}
