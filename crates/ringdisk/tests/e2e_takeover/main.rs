//! A process in its sandbox that somebody has taken over: what he does through its descriptors (its
//! memory, its lines to helpers, what it hands to a successor) reaches nothing but its own disk.

mod agent;
mod chain;
#[path = "../common/mod.rs"]
mod common;
mod helper;
#[cfg(target_arch = "x86_64")]
#[path = "../e2e_probe/inject.rs"]
#[allow(dead_code)]
mod inject;
#[path = "../e2e_keep/kept.rs"]
#[allow(dead_code)]
mod kept;
mod others;
mod state;
mod successor;
#[cfg(target_arch = "x86_64")]
#[path = "../e2e_probe/traced.rs"]
#[allow(dead_code)]
mod traced;
