# Suite "fuse": the project's own end-to-end tests of served files, built here, run there; on
# /dev/fuse and over io_uring. Sourced by tests/vm/run.
# shellcheck shell=bash disable=SC2154 # variables of tests/vm/run

# The tests: a program, the transports it runs on, its modules, and when; each line is one run for
# each transport. What takes the transport from RINGDISK_TEST_TRANSPORT runs once for each; the
# others name theirs themselves ("own"). Lines of `machine` have one module each: they change
# settings of the whole machine. When:
#
#   -            always: that kernel, its NUMA nodes or its CPUs are what is tested
#   uring        where this machine's kernel has no FUSE over io_uring, and with RINGDISK_FULL=1;
#                else other suites of `./test` run them here, on each transport
#   passthrough  the same with FUSE passthrough
#   full         with RINGDISK_FULL=1
#
# Where a filter asks for tests they run whatever stands there.
fuse_tests() {
  cat <<'LIST'
exports own           handover,kernel_orders,refused,uring             -
exports own           mounts,semantics                                 uring
leaks   own           -                                                uring
machine own           numa                                             -
machine uring         numa                                             full
machine own           nbd_device                                       -
machine own           placement                                        -
machine own           hotplug                                          -
machine own           forbidden                                        uring
machine own           ring_limits                                      -
machine own           stopped                                          uring
machine own           switch_race                                      uring
machine own           leaks                                            -
mounts  own           client_memory,windows                            -
mounts  own           passthrough                                      passthrough
mounts  uring         uring                                            uring
rights  own           run_as                                           -
files   uring         bytes,coherence,semantics,verify                 -
rights  own           mount,serve                                      full
files   zero-copy     bytes,crash,semantics,verify                     full
files   dev           bytes,coherence,crash,semantics,verify           full
files   dev,uring     broken,ctl,lifecycle,storage,user                full
exports own           depth,faults                                     full
hot_path own          -                                                full
mounts  own           busy,stopped_server                              full
LIST
}

# fuse_is_wanted WHEN
fuse_is_wanted() {
  [ -z "${RINGDISK_FULL:-}" ] || return 0
  case $1 in
    -) ;;
    uring) [ ! -e /sys/module/fuse/parameters/enable_uring ] ;;
    passthrough) ! fuse_has_passthrough ;;
    *) return 1 ;;
  esac
}

# Whether this machine's kernel can pass files through (Linux 6.9, where it was configured). One
# that shows no configuration is asked by its version.
fuse_has_passthrough() {
  local config
  config=$(zcat /proc/config.gz 2>/dev/null || cat "/boot/config-$(uname -r)" 2>/dev/null)
  if [ -n "$config" ]; then grep -q '^CONFIG_FUSE_PASSTHROUGH=y' <<<"$config"; return; fi
  printf '6.9\n%s\n' "$(uname -r)" | sort -CV
}

# Tests that are left out there without RINGDISK_FULL=1, each below the reason.
fuse_skipped() {
  [ -n "${RINGDISK_FULL:-}" ] || cat <<'LIST'
# A minute each: the pools and zero-copy of that kernel are what is new there.
machine leaks::over_dev::
machine leaks::over_uring::
# A minute: with_zero_copy mounts as often.
machine leaks::over_pools::mounts_leave_nothing_behind
# Nothing of it depends on NUMA nodes or on that kernel.
machine placement::a_large_machine_is_shown_as_it_is
machine placement::a_single_thread_is_bound_to_the_whole_list
machine placement::an_idle_mount_takes_what_the_documentation_says
machine placement::cpus_that_cannot_be_used_are_refused
machine placement::threads_are_on_the_cpus_of_the_list
machine placement::topology_of_what_is_not_mounted
machine placement::under_a_mask_without_a_cpu
# Work of qemu-img: no kernel is different about it.
files bytes::all_cluster_sizes_versions_and_refcount_widths
files bytes::internal_snapshots_do_not_matter
files bytes::external_data_files
files bytes::preallocated_and_bitmap_images
files bytes::raw_images_of_odd_sizes_are_served_whole
# A minute: xfs does the same in a fifth of it.
files verify::ext4_lives_on_a_loop_device_over_a_served_disk
# A minute: coherence has mappings.
files verify::mappings_read_back_what_they_wrote
# The same requests are sent by libaio and io_uring, deeper.
files verify::psync_reads_back_what_it_wrote
# The page cache turns them into what bytes and coherence send.
files verify::small_and_odd_buffered_writes_read_back
# No kernel is different about it; zero-copy is.
rights run_as::a_mount_is_the_owner_of_its_image
rights run_as::why_it_stays_root_is_told
rights run_as::an_overlay_where_the_user
rights run_as::a_user_that_is_named_is_taken
rights run_as::a_disk_of_a_machine_is_served
rights run_as::a_disk_that_waits_for_its_machine
rights run_as::several_disks_are_served_by_their_owner
rights run_as::a_kept_mount_is_the_owners_again
rights run_as::words_that_name_nobody
rights run_as::an_ordinary_user_stays
# Partitions of the kernel are what is new there.
mounts windows::a_file_system_in_a_partition
mounts windows::what_is_no_partition_is_refused
mounts windows::the_size_of_a_partition_is_fixed
mounts windows::a_partition_is_served_to_virtual_machines_too
LIST
}

# Builds the tests: prints name, directory of the package and program of each. Other packages have
# programs of the same names.
fuse_programs() {
  built >"$run/cargo" || return
  programs_of "$run/cargo" | awk '$2 ~ /\/crates\/(fuse|ringdisk)$/'
}

# fuse_names PROGRAM MODULES SKIPPED FILTER…: names of the tests of these modules ("-": of all) that
# do not begin with a line of SKIPPED and, where there are filters, contain one of them.
fuse_names() {
  local program=$1 modules=$2 skipped=$3; shift 3
  "$program" --list --format terse 2>/dev/null | sed -n 's/: test$//p' |
    awk -v modules="$modules" -v skipped="$skipped" -v filters="$*" '
      BEGIN {
        m = split(modules, module, ","); k = split(skipped, skip, "\n")
        f = split(filters, filter, " ")
      }
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
  local programs name transports modules when directory program transport names each skipped
  programs=$(fuse_programs) || return
  printf 'skips_sh=%q filtered=%q\n' "$here/suites/skips.sh" "${1:+1}"
  # The complaints are those of the whole run (lib/machine.sh).
  printf 'kernel_complaints=%q\n' "$complaints"
  cat "$here/suites/each.job" "$here/suites/fuse.job"
  while read -r name transports modules when; do
    [ $# -gt 0 ] || fuse_is_wanted "$when" || continue
    # Other packages have programs of the same name: hot_path is here that of the fuse crate.
    read -r directory program \
      <<<"$(awk -v name="$name" '$1 == name {print $2, $3}' <<<"$programs")"
    [ -n "$program" ] ||
      { echo "vm: there is no test $name (tests/vm/suites/fuse.sh)" >&2; return 1; }
    skipped=$(fuse_skipped | awk -v name="$name" '$1 == name {print $2}')
    mapfile -t names < <(fuse_names "$program" "$modules" "$skipped" "$@")
    if [ ${#names[@]} -eq 0 ]; then
      [ $# -gt 0 ] && continue
      echo "vm: $name has no tests $modules (tests/vm/suites/fuse.sh)" >&2
      return 1
    fi
    for each in ${modules//,/ }; do
      [ "$each" = - ] || [ $# -gt 0 ] || printf '%s\n' "${names[@]}" | grep "^$each::" >/dev/null ||
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
