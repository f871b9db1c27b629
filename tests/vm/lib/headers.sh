# Kernel headers and the compiler that Debian builds its kernels with, to build kernel/vhost-blk.
# Sourced after fetch.sh; needs root (chroot).
#
# Everything goes into one tree, $cache/kbuild: unpacked packages of trixie and trixie-backports,
# found by the private apt configuration of fetch.sh. Nothing is installed, no maintainer script
# runs, and this machine's sources are not read. Headers of several kernels live in it side by side,
# as on a real system. To start anew: remove the tree.
# shellcheck shell=bash disable=SC2154 # variables of fetch.sh and who sources it

kbuild=$cache/kbuild

# What a build of a module calls: Debian's headers name gcc-14, which needs `as`; their scripts need
# a shell and its tools.
kbuild_tools=(base-files bash dash coreutils diffutils xz-utils findutils grep sed mawk make gcc-14
  binutils libc6-dev kmod pahole bpftool)

# headers_version WANTED: the kernel whose headers are to be used: WANTED itself where it is a whole
# version that is still there, else the newest of its series. Old versions leave backports within
# days.
headers_version() {
  local wanted=$1 series found pattern
  series=$(grep -oE '^[0-9]+\.[0-9]+' <<<"$wanted") || return
  pattern="^linux-headers-${series//./\\.}\\..*-cloud-amd64\$"
  found=$(apt_private apt-cache search --names-only "$pattern" |
    awk '{sub("^linux-headers-", "", $1); print $1}' | sort -V)
  grep -Fx -- "$wanted" <<<"$found" || tail -n 1 <<<"$found" | grep .
}

# kbuild_unpack PACKAGE…: downloads the packages and all that they need, and unpacks what the tree
# does not have yet.
kbuild_unpack() {
  local each name
  # The empty status file of the private configuration makes apt name everything, down to libc.
  apt_private apt-get install -y --download-only --no-install-recommends -t trixie-backports \
    "$@" || return
  mkdir -p "$kbuild/unpacked"
  # base-files first: it brings the links from /bin and /lib to /usr.
  for each in "$cache"/apt/archives/base-files_*.deb "$cache"/apt/archives/*.deb; do
    name=${each##*/}
    [ -e "$each" ] || continue
    if [ ! -e "$kbuild/unpacked/$name" ]; then
      dpkg-deb -x "$each" "$kbuild" || return
      : >"$kbuild/unpacked/$name"
    fi
  done
  rm -f "$cache"/apt/archives/*.deb
  # What the maintainer scripts of dash and mawk do.
  [ -e "$kbuild/bin/sh" ] || ln -s dash "$kbuild/bin/sh" || return
  [ -e "$kbuild/usr/bin/awk" ] || ln -s mawk "$kbuild/usr/bin/awk"
}

# fetch_headers SERIES: headers and compiler are in the tree afterwards. Prints the version. SERIES
# may be "debug" (tests/vm/debug-kernel).
fetch_headers() {
  local wanted=$1 version have
  have=$cache/kbuild/series/$wanted
  if [ -e "$have" ]; then cat "$have"; return; fi
  [ "$wanted" != debug ] ||
    { echo "there is no debug kernel: run tests/vm/debug-kernel" >&2; return 1; }
  apt_lists >&2 || return
  if ! version=$(headers_version "$wanted"); then
    echo "no linux-headers-$wanted*-cloud-amd64 in trixie or trixie-backports" >&2
    return 1
  fi
  kbuild_unpack "${kbuild_tools[@]}" "linux-headers-$version" >&2 || return
  mkdir -p "${have%/*}"
  echo "$version" >"$have"
  echo "$version"
}

# in_kbuild SOURCE COMMAND…: runs a command in the tree, with SOURCE of this machine at /source, and
# what the kernel's scripts want of /dev and /proc.
in_kbuild() {
  local source=$1; shift
  mkdir -p "$kbuild/source" "$kbuild/dev" "$kbuild/proc" "$kbuild/tmp"
  # The mounts belong to a name space of the command and go with it.
  # shellcheck disable=SC2016 # expanded by the inner shell
  unshare --mount --propagation private sh -c '
    tree=$1 source=$2; shift 2
    mount --bind "$source" "$tree/source" || exit 125
    mount --bind /dev "$tree/dev" && mount --bind /proc "$tree/proc" || exit 125
    exec chroot "$tree" "$@"' sh "$kbuild" "$source" \
    /usr/bin/env -i PATH=/usr/bin:/usr/sbin LC_ALL=C.UTF-8 "$@"
}

# fetch_vhost VERSION: prints the path of that kernel's own vhost.ko.xz. Kernels of backports have
# their modules in a package of their own.
fetch_vhost() {
  local version=$1 file=$cache/vhost-blk/vhost-$1.ko.xz each at
  if [ -e "$file" ]; then echo "$file"; return; fi
  mkdir -p "${file%/*}"
  at=$(mktemp -d "$cache/unpack.XXXXXX") || return
  for each in linux-modules linux-image; do
    (cd "$at" && apt_private apt-get download "$each-$version") >&2 || continue
    dpkg-deb --fsys-tarfile "$at"/*.deb |
      tar -xO --wildcards '*/kernel/drivers/vhost/vhost.ko.xz' >"$at/vhost" &&
      [ -s "$at/vhost" ] && mv "$at/vhost" "$file" && break
    rm -f "$at"/*.deb
  done
  rm -rf "$at"
  [ -e "$file" ] && echo "$file"
}
