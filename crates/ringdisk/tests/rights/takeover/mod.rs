//! A process in its sandbox that an attacker has taken over: what he does through its descriptors
//! (its memory, its lines to helpers, what it hands to a successor) reaches nothing but its own
//! disk.

mod agent;
mod chain;
mod disks;
mod helper;
#[path = "../../mounts/keep/kept.rs"]
#[allow(dead_code)]
mod kept;
mod memory;
mod mirror;
#[path = "../../mounts/upgrade/taken.rs"]
#[allow(dead_code)]
mod mounted;
mod mounts;
mod others;
mod state;
mod successor;
