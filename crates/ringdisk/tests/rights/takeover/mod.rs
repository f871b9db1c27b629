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
#[path = "../../mounts/upgrade/upgraded_mount.rs"]
#[allow(dead_code)]
mod mounted;
mod mounts;
mod out_of_reach;
mod state;
mod successor;
