//! Whole devices in this process, with a driver and a front end of ours.

#[path = "../common/mod.rs"]
mod common;
mod device;
mod features;
mod front_ends;
mod hand_over;
mod life;
mod order;
mod panics;
mod race;
