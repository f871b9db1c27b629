//! What a serving process may still do, and as whom: in its sandbox, with `--user`, and after
//! an attacker has taken it over.

#[path = "../common/mod.rs"]
mod common;
mod mount;
mod one_helper;
mod overlays;
mod probe;
mod run_as;
mod serve;
mod takeover;
