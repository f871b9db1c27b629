# Suite "fuse": the project's own end-to-end tests of served files, built here, run there; on
# /dev/fuse and over io_uring. Sourced by tests/vm/run.
# shellcheck shell=bash disable=SC2154 # variables of tests/vm/run

# The tests, each with the transports it runs on. What takes the transport from
# RINGDISK_TEST_TRANSPORT runs once for each; the tests of the fuse crate, and those of io_uring,
# name theirs themselves. "full" ones run with RINGDISK_FULL=1 or when a filter asks.
fuse_tests() {
  cat <<'LIST'
kernel_orders  own
uring          own
mounts         own
semantics      own
handover       own
leaks          own
refused        own
e2e_numa       uring
e2e_uring      uring
e2e_client_memory own
e2e_passthrough   own
e2e_run_as        own
e2e_windows    own
e2e_numa       own
e2e_placement  own
e2e_hotplug    own
e2e_forbidden  own
e2e_ring_limits own
e2e_stopped    own
e2e_switch_race own
e2e_leaks      own
e2e_sandbox    own        full
e2e_sandbox_serve own      full
e2e_semantics  uring
e2e_coherence  uring
e2e_bytes      uring
e2e_verify     uring
e2e_bytes      zero-copy  full
e2e_crash      zero-copy  full
e2e_verify     zero-copy  full
e2e_semantics  dev,zero-copy  full
depth          own        full
faults         own        full
hot_path       own        full
e2e_coherence  dev        full
e2e_lifecycle  dev,uring  full
e2e_busy       own        full
e2e_storage    dev,uring  full
e2e_bytes      dev        full
e2e_verify     dev        full
e2e_broken     dev,uring  full
e2e_user       dev,uring  full
e2e_ctl        dev,uring  full
e2e_crash      dev        full
LIST
}

# Tests that are left out there without RINGDISK_FULL=1, each with the reason.
fuse_skipped() {
  [ -n "${RINGDISK_FULL:-}" ] || cat <<'LIST'
e2e_lifecycle two_hundred_mounts_leave_nothing_behind         # 3 minutes when emulated; leaks.rs and mounts.rs mount as often
e2e_uring a_hundred_mounts_leave_nothing_behind               # 1 minute; the same
e2e_leaks over_dev                                            # 1 minute; the pools and zero-copy of that kernel are what is new there
e2e_leaks over_uring                                          # 1 minute; the same
e2e_leaks over_pools::mounts_leave_nothing_behind             # 1 minute; with_zero_copy mounts as often
e2e_bytes all_cluster_sizes_versions_and_refcount_widths      # 1 minute of qemu-img; no kernel is different about it
e2e_bytes internal_snapshots_do_not_matter                    # qemu-img's work; no kernel is different about it
e2e_bytes external_data_files                                 # the same
e2e_bytes preallocated_and_bitmap_images                      # the same
e2e_bytes raw_images_of_odd_sizes_are_served_whole            # the same
e2e_verify ext4_lives_on_a_loop_device_over_a_served_disk     # 1 minute; xfs does the same in a fifth of it
e2e_verify mappings_read_back_what_they_wrote                 # 1 minute; e2e_coherence has mappings
e2e_verify psync_reads_back_what_it_wrote                     # libaio and io_uring travel the same way, deeper
e2e_verify small_and_odd_buffered_writes_read_back            # the page cache turns them into what e2e_bytes and e2e_coherence send
e2e_run_as a_mount_is_the_owner_of_its_image                  # no kernel is different about it; zero-copy is
e2e_run_as why_it_stays_root_is_told                          # the same
e2e_run_as an_overlay_where_the_user                          # the same
e2e_run_as a_user_that_is_named_is_taken                      # the same
e2e_run_as a_disk_of_a_machine_is_served                      # the same
e2e_run_as a_disk_that_waits_for_its_machine                  # the same
e2e_run_as several_disks_are_served_by_their_owner            # the same
e2e_run_as a_kept_mount_is_the_owners_again                   # the same
e2e_run_as words_that_name_nobody                             # the same
e2e_run_as an_ordinary_user_stays                             # the same
e2e_windows a_file_system_in_a_partition                      # partitions of the kernel are what is new there
e2e_windows what_is_no_partition_is_refused                   # the same
e2e_windows the_size_of_a_partition_is_fixed                  # the same
e2e_windows a_partition_is_served_to_virtual_machines_too     # the same
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

# suite_job FILTER…: prints the job that runs them.
suite_job() {
  local programs name transports size directory program transport words each
  programs=$(fuse_programs) || return
  printf 'skips_sh=%q filtered=%q\n' "$here/suites/skips.sh" "${1:+1}"
  # The complaints are those of the whole run (lib/machine.sh).
  printf 'kernel_complaints=%q\n' "$complaints"
  cat "$here/suites/each.job" "$here/suites/fuse.job"
  while read -r name transports size; do
    [ -n "$size" ] && [ -z "${RINGDISK_FULL:-}" ] && [ $# -eq 0 ] && continue
    read -r directory program <<<"$(awk -v name="$name" '$1 == name {print $2, $3}' <<<"$programs")"
    [ -n "$program" ] || { echo "vm: there is no test $name (tests/vm/suites/fuse.sh)" >&2; return 1; }
    words=("$@")
    while read -r each; do words+=(--skip "$each"); done < <(fuse_skipped | awk -v name="$name" '$1 == name {print $2}')
    for transport in ${transports//,/ }; do
      # A thousand mounts on each transport take longer than all of the rest: they are for who asks
      # for them (tests/full-runs leaks-7.3).
      if [ "$name" = e2e_leaks ] && [ $# -eq 0 ]; then printf 'RINGDISK_FULL= '; fi
      printf 'tests %q %q %q %q' "$name" "$transport" "$directory" "$program"
      [ ${#words[@]} -eq 0 ] || printf ' %q' "${words[@]}"
      echo
    done
  done < <(fuse_tests)
  echo 'summary'
}
