# What the virtual machine needs: a kernel that is newer than the one here, busybox for its first
# process, QEMU and virtiofsd. Sourced by tests/vm/run.
#
# Kernel and busybox come from Debian's trixie and trixie-backports by an apt configuration of our
# own: sources, lists and cache are in $cache/apt, nothing of this machine's apt is read but its
# proxy and its mirror, nothing is installed. They are unpacked once and kept: to get a newer one,
# remove $cache/kernel.
# shellcheck shell=bash disable=SC2154,SC2034 # variables of tests/vm/run, and for machine.sh

# Version of the kernel, or its beginning; the newest that fits is taken. Or "debug": that of
# tests/vm/debug-kernel.
kernel_wanted=${RINGDISK_VM_KERNEL:-7.3}
kernel_dir=$cache/kernel/$kernel_wanted
busybox=$cache/busybox

apt_private() {
  local tool=$1; shift
  "$tool" -c "$cache/apt/apt.conf" -q "$@"
}

# Writes the private configuration and gets the lists.
apt_lists() {
  local apt=$cache/apt mirror keyring=/usr/share/keyrings/debian-archive-keyring.gpg signed=
  mirror=$("$project/bench/peer" mirror) || return
  mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$apt/empty"
  : >"$apt/status"
  [ -e "$keyring" ] && signed="[signed-by=$keyring] "
  printf "deb ${signed}%s %s main\n" "$mirror" trixie "$mirror" trixie-backports \
    >"$apt/sources.list"
  # Hooks of this machine's apt would clean *its* caches; a mirror that is a snapshot of an older
  # day is as good as any.
  cat >"$apt/apt.conf" <<CONF
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear Acquire::IndexTargets::deb::DEP-11;
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "$apt/empty";
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache "$apt";
Dir::Cache::archives "$apt/archives";
APT::Architecture "amd64";
APT::Architectures {"amd64";};
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false";
Acquire::Check-Date "false";
CONF
  apt_private apt-get update
}

# unpack DIRECTORY PACKAGE…: downloads them and unpacks them there.
unpack() {
  local into=$1 at each; shift
  at=$(mktemp -d "$cache/unpack.XXXXXX") || return
  (cd "$at" && apt_private apt-get download "$@") || { rm -rf "$at"; return 1; }
  mkdir -p "$into"
  for each in "$at"/*.deb; do dpkg-deb -x "$each" "$into" || { rm -rf "$at"; return 1; }; done
  rm -rf "$at"
}

# kernel_package NAME: the newest package NAME-VERSION whose version begins as wanted, or nothing.
kernel_package() {
  apt_private apt-cache search --names-only "^$1-${kernel_wanted//./\\.}.*-cloud-amd64\$" |
    awk '{print $1}' | sort -V | tail -n 1
}

# Puts vmlinuz, version and modules/lib/modules/VERSION into $kernel_dir, and busybox beside it.
fetch_kernel() {
  [ -e "$kernel_dir/version" ] && [ -x "$busybox" ] && return
  if [ "$kernel_wanted" = debug ]; then
    # It was built before (tests/vm/run); busybox comes with a kernel of Debian.
    [ -e "$kernel_dir/version" ] || { echo "no kernel in $kernel_dir"; return 1; }
    apt_lists && unpack "$cache/busybox.$$" busybox-static &&
      mv "$cache/busybox.$$/usr/bin/busybox" "$busybox" || return
    rm -rf "$cache/busybox.$$"
    return
  fi
  local at=$cache/kernel/new.$$ name version
  mkdir -p "$cache/kernel"
  apt_lists || return
  name=$(kernel_package linux-binary-unsigned)
  rm -rf "$at"
  if [ -n "$name" ]; then
    version=${name#linux-binary-unsigned-}
    unpack "$at/tree" "$name" "linux-modules-$version" busybox-static || return
  else
    # Kernels of trixie itself (6.12) are one package.
    name=$(kernel_package linux-image)
    if [ -z "$name" ]; then
      echo "no linux-binary-unsigned-$kernel_wanted*-cloud-amd64 in trixie-backports," \
        "no linux-image in trixie"
      return 1
    fi
    version=${name#linux-image-}
    unpack "$at/tree" "$name" busybox-static || return
    mv "$at/tree/boot/vmlinuz-$version" "$at/tree/usr/lib/modules/$version/vmlinuz.unsigned" ||
      return
  fi
  mkdir -p "$at/modules/lib/modules"
  mv "$at/tree/usr/lib/modules/$version" "$at/modules/lib/modules/$version" || return
  mv "$at/modules/lib/modules/$version/vmlinuz.unsigned" "$at/vmlinuz" || return
  mv "$at/tree/usr/bin/busybox" "$busybox" || return
  rm -rf "$at/tree"
  # The modprobe of the host's programs wants the binary index, which the depmod of busybox does not
  # make.
  PATH=$PATH:/usr/sbin:/sbin depmod -b "$at/modules" "$version" || return
  echo "$version" >"$at/version"
  rm -rf "$kernel_dir"
  mv "$at" "$kernel_dir"
}

# Puts Debian trixie's systemd, with the few programs that its test needs, into $cache/systemd. No
# script of a package is run.
fetch_systemd() {
  local at=$cache/systemd.$$ debs=$cache/apt/archives each
  [ -e "$cache/systemd/etc/passwd" ] && return
  apt_lists || return
  # To a machine that has nothing, so with all that they need.
  apt_private apt-get -y --no-install-recommends --download-only install systemd systemd-sysv \
    fuse3 bash coreutils findutils grep util-linux procps || return
  mkdir -p "$at"
  for each in "$debs"/*.deb; do dpkg-deb -x "$each" "$at" || return; done
  rm -f "$debs"/*.deb
  cp "$at/usr/share/base-passwd/passwd.master" "$at/etc/passwd" || return
  cp "$at/usr/share/base-passwd/group.master" "$at/etc/group" || return
  PATH=$PATH:/usr/sbin:/sbin ldconfig -r "$at" || return
  rm -rf "$cache/systemd"
  mv "$at" "$cache/systemd"
}

# Debian 12 has virtiofsd beside QEMU, later ones have it as a package of its own.
find_virtiofsd() {
  local each
  for each in /usr/libexec/virtiofsd /usr/lib/qemu/virtiofsd; do
    if [ -x "$each" ]; then virtiofsd=$each; return; fi
  done
  return 1
}

# Sets $qemu and $virtiofsd; installs them, and depmod, where they are missing and this is root on a
# Debian.
fetch_qemu() {
  local wanted=()
  PATH=$PATH:/usr/sbin:/sbin command -v depmod >/dev/null || wanted+=(kmod)
  qemu=$(command -v qemu-system-x86_64) || wanted+=(qemu-system-x86)
  if ! find_virtiofsd && apt-cache show virtiofsd >/dev/null 2>&1; then wanted+=(virtiofsd); fi
  if [ ${#wanted[@]} -gt 0 ]; then
    command -v apt-get >/dev/null ||
      { echo "qemu-system-x86_64 and virtiofsd are missing"; return 1; }
    apt-get -q update || return
    DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends "${wanted[@]}" ||
      return
  fi
  qemu=$(command -v qemu-system-x86_64) && find_virtiofsd
}

# fetch LOG: all of it; what apt says goes into LOG.
fetch() {
  { command -v apt-get && command -v dpkg-deb; } >/dev/null ||
    { echo "this is not a Debian (apt-get, dpkg-deb)"; return 1; }
  [ "$(uname -m)" = x86_64 ] || { echo "the virtual machine is for x86-64 only"; return 1; }
  fetch_qemu >>"$1" 2>&1 || { tail -n 5 "$1"; echo "no QEMU with virtiofsd"; return 1; }
  fetch_kernel >>"$1" 2>&1 || { tail -n 5 "$1"; echo "no kernel"; return 1; }
}
