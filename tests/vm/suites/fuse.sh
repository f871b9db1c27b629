# shellcheck shell=bash
suite_job() { echo "not yet" >&2; return 1; }
