# Suite "vhost-user": virtual machines whose disks `ringdisk serve` serves, with QEMU on this
# machine (tests/vm/vhost_user). Sourced by tests/vm/run.
# shellcheck shell=bash disable=SC2154 # variables of tests/vm/run, fetch.sh

# The QEMU of bench/peer where that is installed, with its firmware; else this machine's. Sets
# qemu_words.
vhost_user_qemu() {
  local tree name=qemu-system-x86_64
  tree=$("$project/bench/peer" path)
  if [ -z "${RINGDISK_VM_SYSTEM_QEMU:-}" ] && [ -x "$tree/usr/bin/$name" ] &&
    [ -e "$tree/usr/share/seabios/bios-256k.bin" ]; then
    mapfile -t qemu_words < <("$project/bench/peer" argv "$name")
    qemu_words+=(-L "$tree/usr/share/seabios" -L "$tree/usr/share/qemu")
  else
    qemu_words=("$qemu")
  fi
}

# suite_here FILTER…: runs on this machine, in a shell of its own; the exit status is that of the
# tests.
suite_here() {
  local words=() each
  for each in python3 qemu-img qemu-io fio mkfs.ext4 as ld ip ss openssl; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$each" >/dev/null || unavailable "there is no $each"
  done
  built >"$run/cargo" || { echo "vm: ringdisk could not be built" >&2; return 1; }
  each='.*"reason":"compiler-artifact".*"kind":\["bin"\].*"name":"ringdisk".*"test":false}'
  each=$(sed -n "s|$each.*\"executable\":\"\([^\"]*\)\".*|\1|p" "$run/cargo")
  [ -x "$each" ] || { echo "vm: cargo made no ringdisk" >&2; return 1; }
  vhost_user_qemu
  if [ $# -gt 0 ]; then words=(-- "$@"); fi
  mkdir "$run/files"
  # In place of this shell, so that a signal for it is one for the tests, which end what they have
  # started.
  exec timeout -k 30 "$limit_s" python3 -B "$here/vhost_user" "$each" "$kernel_dir" "$busybox" \
    "$run/files" "${qemu_words[@]}" "${words[@]}"
}
