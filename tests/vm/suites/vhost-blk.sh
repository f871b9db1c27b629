# Suite "vhost-blk": the kernel module, built for the machine's kernel, and a driver of ours on it
# (tests/vm/vhost_blk); "module" is the daemon's side of it (crates/vblk/tests/module.rs), "accel"
# `ringdisk serve --accel` (crates/ringdisk/tests/accel), of which a filter such as "accel::memory"
# takes a part. Sourced by tests/vm/run.
# shellcheck shell=bash disable=SC2154 # variables of tests/vm/run

# The tests, each with its disk, engine and arguments. Disks are made in the machine
# (vhost-blk.job): memory is brd, the others but tmpfs and ext4 (files), frozen and reserved (files
# on ext4 in a loop device) and scsi (scsi_debug, with bad sectors) are null_blk, ending in
# interrupts after 20 us, 1 ms (gone), 30 ms or 1 s, or with bad blocks, or for the host to swap to.
# RINGDISK_FULL kills a hundred times, hands over a thousand times, and fuzzes for ten minutes in
# place of 10 s (RINGDISK_FUZZ_S=N: for N seconds; RINGDISK_SEED=N: as a run that printed this
# seed). Other kernels than 7.3 (RINGDISK_VM_KERNEL) run the same tests.
vhost_blk_tests() {
  cat <<'LIST'
control      memory  kiocb
requests     memory  kiocb
requests     memory  bio
requests     quick   kiocb
requests     quick   bio
requests     memory  default
requests     ext4    default
requests     tmpfs   kiocb
requests     ext4    kiocb
bounce       memory  kiocb
bounce       memory  bio
bounce       ext4    kiocb
read-only    memory  bio
read-only    tmpfs   kiocb
workers      memory  bio
verify       memory  kiocb
verify       memory  bio
verify       quick   kiocb
verify       quick   bio
verify       tmpfs   kiocb
verify       ext4    kiocb
rings        memory  kiocb
rings        quick   bio
errors       bad     kiocb
errors       bad     bio
errors       scsi    kiocb
errors       scsi    bio
memory       memory  kiocb
memory       quick   bio
holes        quick   kiocb
holes        quick   bio
holes        ext4    kiocb
addresses    middle  kiocb
addresses    middle  bio
interrupted  slow    kiocb
interrupted  slow    bio
frozen       frozen  kiocb
dying        slow    kiocb
dying        slow    bio
dying        memory  kiocb
dying        quick   kiocb
dying        quick   bio
dying        ext4    kiocb
dying        tmpfs   kiocb
removal      gone    kiocb
removal      gone    bio
kill         slow    kiocb 5
kill         slow    bio 5
kill         middle  kiocb 20
kill         middle  bio 20
crash        quick   kiocb 20
crash        quick   bio 20
crash        memory  kiocb 20
crash        ext4    kiocb 20
cache        quick   bio
cache        ext4    kiocb
round-trips  memory  kiocb
round-trips  quick   bio
races        quick   bio
races        memory  kiocb
crowd        middle  kiocb
crowd        quick   bio
closing      memory  kiocb
closing      memory  bio
charged      quick   bio
charged      tmpfs   kiocb
reclaim      quick   kiocb
reclaim      quick   bio
swap         swap    kiocb
swap         swap    bio
accounted    memory  default
stuck        frozen  default
rights       reserved kiocb
grace-periods middle kiocb
grace-periods middle bio
load         memory  kiocb 4 1
load         memory  kiocb 4
load         memory  bio 4
load         quick   kiocb 4 1
load         quick   kiocb 4
load         quick   bio 4
fuzz         quick   default 10
removal      scsi    bio
LIST
}

# Builds the workspace's tests that need the module; prints the name, directory and program of each:
# those of the daemon's side of it, and of `ringdisk serve --accel`.
vhost_blk_programs() {
  built >"$run/cargo" || return
  programs_of "$run/cargo" | awk '$1 == "module" || $1 == "accel"'
}

# vhost_blk_modules MODULE: makes modules that do not fit, each by one change of a copy of the
# sources; prints their directory, with a copy of MODULE. The daemon has to refuse them.
vhost_blk_modules() {
  local name copy=$run/copy out=$run/modules version
  version=$(cat "$kernel_dir/version")
  mkdir -p "$out" && cp "$1" "$out/usual.ko" || return
  for name in version layout; do
    rm -rf "$copy"
    mkdir -p "$copy/kernel" && cp -a "$project/kernel/vhost-blk" "$copy/kernel/" &&
      ln -s "$project/tests" "$copy/tests" || return
    case $name in
      version)
        sed -i 's/^\(#define RINGDISK_VBLK_VERSION\) 1$/\1 1001/' \
          "$copy/kernel/vhost-blk/ringdisk_vhost_blk.h" ;;
      # A field more, and nobody who looks before it is built.
      layout)
        sed -i 's/^struct vhost_virtqueue {$/&\n\tunsigned long another;/' \
          "$copy"/kernel/vhost-blk/vhost/*/vhost.h
        printf '#!/bin/sh\nexit 0\n' >"$copy/kernel/vhost-blk/check-layout" ;;
    esac || return
    if diff -rq "$project/kernel/vhost-blk" "$copy/kernel/vhost-blk" >/dev/null; then
      echo "vm: nothing was changed for $name.ko" >&2
      return 1
    fi
    cp "$("$copy/kernel/vhost-blk/build" "$version" 2>"$run/build.log" ||
      cat "$run/build.log" >&2)" "$out/$name.ko" || return
  done
  rm -rf "$copy"
  echo "$out"
}

# suite_job FILTER…: builds module, driver and programs of tests, prints the job that runs them.
suite_job() {
  local module modules name disk engine words each directory program
  local programs=(module accel)
  module=$("$project/kernel/vhost-blk/build" "$(cat "$kernel_dir/version")" 2>"$run/build.log") ||
    { cat "$run/build.log" >&2; return 1; }
  [[ $module == *"/$(cat "$kernel_dir/version")-"* ]] ||
    { echo "vm: no headers of this kernel any more; remove $kernel_dir" >&2; return 1; }
  # Static: it runs wherever the machine's root comes from.
  cc -O2 -g -Wall -Wextra -Werror -static -pthread -o "$run/driver" "$here"/vhost_blk/*.c >&2 ||
    return
  printf 'module=%q driver=%q skips_sh=%q\n' "$module" "$run/driver" "$here/suites/skips.sh"
  cat "$here/suites/each.job" "$here/suites/vhost-blk.job"
  while read -r name disk engine words; do
    for each in "${@:-}"; do
      if [ -n "${RINGDISK_FULL:-}" ]; then
        case $name in kill | crash) words=100 ;; round-trips) words=1000 ;; fuzz) words=600 ;; esac
      fi
      if [ "$name" = fuzz ] && [ -n "${RINGDISK_FUZZ_S:-}" ]; then words=$RINGDISK_FUZZ_S; fi
      if [[ "$name $disk $engine" == *"$each"* ]]; then
        echo "check $name $disk $engine $words"
        break
      fi
    done
  done < <(vhost_blk_tests)
  # Minutes of building: only where a filter wants one of them ("kiocb bio default" does not).
  words=
  for name in "${programs[@]}"; do
    for each in "${@:-}"; do
      if [[ $name == *"$each"* || $each == "$name"::* ]]; then words=1; fi
    done
  done
  if [ -z "$words" ]; then echo 'summary'; return; fi
  vhost_blk_programs >"$run/programs" && [ "$(wc -l <"$run/programs")" = ${#programs[@]} ] ||
    { echo "vm: not all programs of tests were built" >&2; return 1; }
  while read -r name directory program; do
    for each in "${@:-}"; do
      if [[ $name == *"$each"* ]]; then words=
      elif [[ $each == "$name"::* ]]; then words=${each#*::}
      else continue; fi
      if [ "$name" = accel ]; then
        modules=$(vhost_blk_modules "$module") || return
        printf 'export RINGDISK_TEST_MODULES=%q\n' "$modules"
      fi
      echo "program $name $(printf '%q ' "$directory" "$program") $words"
      break
    done
  done <"$run/programs"
  echo 'summary'
}
