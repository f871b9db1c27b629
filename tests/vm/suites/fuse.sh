# Suite "fuse": the project's own end-to-end tests of served files, built here, run there; on
# /dev/fuse and over io_uring. Sourced by tests/vm/run.
# shellcheck shell=bash disable=SC2154 # variables of tests/vm/run

# The tests: a program, the transports it runs on, and its modules; each line is one run for each
# transport. What takes the transport from RINGDISK_TEST_TRANSPORT runs once for each; the others
# name theirs themselves ("own"). "full" ones run with RINGDISK_FULL=1 or when a filter asks. Lines
# of `machine` have one module each: they change settings of the whole machine.
fuse_tests() {
  cat <<'LIST'
exports own           handover,kernel_orders,mounts,refused,semantics,uring
leaks   own           -
machine own           numa
machine uring         numa
machine own           placement
machine own           hotplug
machine own           forbidden
machine own           ring_limits
machine own           stopped
machine own           switch_race
machine own           leaks
mounts  own           client_memory,passthrough,windows
mounts  uring         uring
rights  own           run_as
files   uring         bytes,coherence,semantics,verify
rights  own           mount,serve                        full
files   zero-copy     bytes,crash,semantics,verify       full
files   dev           bytes,coherence,crash,semantics,verify  full
files   dev,uring     broken,ctl,lifecycle,storage,user  full
exports own           depth,faults                       full
hot_path own          -                                  full
mounts  own           busy,stopped_server                full
LIST
}

# Tests that are left out there without RINGDISK_FULL=1, each with the reason.
fuse_skipped() {
  [ -n "${RINGDISK_FULL:-}" ] || cat <<'LIST'
machine leaks::over_dev::                                                 # 1 minute; the pools and zero-copy of that kernel are what is new there
machine leaks::over_uring::                                               # 1 minute; the same
machine leaks::over_pools::mounts_leave_nothing_behind                    # 1 minute; with_zero_copy mounts as often
files bytes::all_cluster_sizes_versions_and_refcount_widths               # 1 minute of qemu-img; no kernel is different about it
files bytes::internal_snapshots_do_not_matter                             # qemu-img's work; no kernel is different about it
files bytes::external_data_files                                          # the same
files bytes::preallocated_and_bitmap_images                               # the same
files bytes::raw_images_of_odd_sizes_are_served_whole                     # the same
files verify::ext4_lives_on_a_loop_device_over_a_served_disk              # 1 minute; xfs does the same in a fifth of it
files verify::mappings_read_back_what_they_wrote                          # 1 minute; coherence has mappings
files verify::psync_reads_back_what_it_wrote                              # libaio and io_uring travel the same way, deeper
files verify::small_and_odd_buffered_writes_read_back                     # the page cache turns them into what bytes and coherence send
rights run_as::a_mount_is_the_owner_of_its_image                          # no kernel is different about it; zero-copy is
rights run_as::why_it_stays_root_is_told                                  # the same
rights run_as::an_overlay_where_the_user                                  # the same
rights run_as::a_user_that_is_named_is_taken                              # the same
rights run_as::a_disk_of_a_machine_is_served                              # the same
rights run_as::a_disk_that_waits_for_its_machine                          # the same
rights run_as::several_disks_are_served_by_their_owner                    # the same
rights run_as::a_kept_mount_is_the_owners_again                           # the same
rights run_as::words_that_name_nobody                                     # the same
rights run_as::an_ordinary_user_stays                                     # the same
mounts windows::a_file_system_in_a_partition                              # partitions of the kernel are what is new there
mounts windows::what_is_no_partition_is_refused                           # the same
mounts windows::the_size_of_a_partition_is_fixed                          # the same
mounts windows::a_partition_is_served_to_virtual_machines_too             # the same
LIST
}

# Builds the tests: prints name, directory of the package and program of each. Other packages have
# programs of the same names.
fuse_programs() {
  # The whole workspace, as `./test` builds it: other sets of packages would be other builds.
  cargo test --no-run --manifest-path "$project/Cargo.toml" --workspace --message-format=json >"$run/cargo" || return
  sed -n 's/.*"reason":"compiler-artifact".*"manifest_path":"\([^"]*crates\/\(fuse\|ringdisk\)\)\/Cargo.toml".*"kind":\["test"\].*"name":"\([^"]*\)","src_path".*"executable":"\([^"]*\)".*/\3 \1 \4/p' \
    "$run/cargo"
}

# fuse_names PROGRAM MODULES SKIPPED FILTER…: names of the tests of these modules ("-": of all) that
# do not begin with a line of SKIPPED and, where there are filters, contain one of them.
fuse_names() {
  local program=$1 modules=$2 skipped=$3; shift 3
  "$program" --list --format terse 2>/dev/null | sed -n 's/: test$//p' |
    awk -v modules="$modules" -v skipped="$skipped" -v filters="$*" '
      BEGIN {m = split(modules, module, ","); k = split(skipped, skip, "\n"); f = split(filters, filter, " ")}
      {
        wanted = modules == "-"; asked = f == 0; left_out = 0
        for (i = 1; i <= m; i++) if (index($0, module[i] "::") == 1) wanted = 1
        for (i = 1; i <= k; i++) if (skip[i] != "" && index($0, skip[i]) == 1) left_out = 1
        for (i = 1; i <= f; i++) if (index($0, filter[i])) asked = 1
        if (wanted && asked && !left_out) print
      }'
}

# suite_job FILTER…: prints the job that runs them.
suite_job() {
  local programs name transports modules size directory program transport names each
  programs=$(fuse_programs) || return
  printf 'skips_sh=%q filtered=%q\n' "$here/suites/skips.sh" "${1:+1}"
  # The complaints are those of the whole run (lib/machine.sh).
  printf 'kernel_complaints=%q\n' "$complaints"
  cat "$here/suites/each.job" "$here/suites/fuse.job"
  while read -r name transports modules size; do
    [ -n "$size" ] && [ -z "${RINGDISK_FULL:-}" ] && [ $# -eq 0 ] && continue
    # Other packages have programs of the same name: hot_path is here that of the fuse crate.
    read -r directory program <<<"$(awk -v name="$name" '$1 == name {print $2, $3}' <<<"$programs")"
    [ -n "$program" ] || { echo "vm: there is no test $name (tests/vm/suites/fuse.sh)" >&2; return 1; }
    mapfile -t names < <(fuse_names "$program" "$modules" "$(fuse_skipped | awk -v name="$name" '$1 == name {print $2}')" "$@")
    if [ ${#names[@]} -eq 0 ]; then
      [ $# -gt 0 ] && continue
      echo "vm: $name has no tests $modules (tests/vm/suites/fuse.sh)" >&2
      return 1
    fi
    for each in ${modules//,/ }; do
      [ "$each" = - ] || [ $# -gt 0 ] || printf '%s\n' "${names[@]}" | grep -q "^$each::" ||
        { echo "vm: $name has no tests $each (tests/vm/suites/fuse.sh)" >&2; return 1; }
    done
    for transport in ${transports//,/ }; do
      # A thousand mounts on each transport take longer than all of the rest: they are for who asks
      # for them (tests/full-runs leaks-7.3).
      if [ "$modules" = leaks ] && [ $# -eq 0 ]; then printf 'RINGDISK_FULL= '; fi
      printf 'tests %q %q %q %q --exact' "$name" "$transport" "$directory" "$program"
      printf ' %q' "${names[@]}"
      echo
    done
  done < <(fuse_tests)
  echo 'summary'
}
