# Tests that leave themselves out in a virtual machine. Sourced there by the jobs.
#
# A program of tests notes its skips in the file of RINGDISK_TEST_SKIPS
# (crates/testkit/src/skips.rs). They are printed as they are, with @skip before each, for ./test,
# and listed for people at the end.
# shellcheck shell=bash disable=SC2034 # variables of the jobs
skips_here=0 skips_all=$(mktemp)
RINGDISK_TEST_SKIPS=$(mktemp)
export RINGDISK_TEST_SKIPS
# Tests that run as another user note theirs too.
chmod 666 "$RINGDISK_TEST_SKIPS"

# skips_begin: before a program of tests.
skips_begin() { : >"$RINGDISK_TEST_SKIPS"; }

# skips_end NAME: after it. Sets skips_here to the tests that were skipped, and adds them to
# $skipped.
skips_end() {
  sort -u "$RINGDISK_TEST_SKIPS" | sed $'s/^/@skip\t/'
  skips_here=$(awk -F'\t' '$1 == "whole" {print $2, $3}' "$RINGDISK_TEST_SKIPS" | sort -u | wc -l)
  skipped=$((skipped + skips_here))
  sort -u "$RINGDISK_TEST_SKIPS" | awk -F'\t' -v name="$1" \
    '{print name ", " $3 ($1 == "part" ? " (in part)" : "") ": no " $4}' >>"$skips_all"
}

# skips_list: all of them, for people.
skips_list() { sed 's/^/skipped: /' "$skips_all"; }
