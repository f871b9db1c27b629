# Suite "systemd": the units of packaging/systemd under Debian trixie's systemd, which is the first
# process of a PID namespace in the machine. Sourced by tests/vm/run.
# shellcheck shell=bash disable=SC2154 # variables of tests/vm/run

# suite_job FILTER…: prints the job that runs them; FILTER: only cases whose name contains it.
suite_job() {
  local program=${CARGO_TARGET_DIR:-$project/target}/debug/ringdisk
  exec 9>"$cache/lock"
  flock 9
  fetch_systemd >"$run/systemd.log" 2>&1 || { tail -n 6 "$run/systemd.log" >&2; return 1; }
  exec 9>&-
  if [ -z "${RINGDISK_TEST_BUILT:-}" ]; then
    cargo build --manifest-path "$project/Cargo.toml" -p ringdisk >&2 || return
  fi
  printf 'tree=%q program=%q units=%q filters=%q\n' "$cache/systemd" "$(realpath "$program")" \
    "$project/packaging/systemd" "$*"
  cat "$here/suites/systemd.job"
}
