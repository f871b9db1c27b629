//! Mounts and the machine: CPUs, nodes, limits, calls that are forbidden, servers that stand still,
//! and what the kernel keeps. These tests change settings of the machine or look at all of it, so
//! they are apart from the others.

#[path = "../common/mod.rs"]
mod common;
mod forbidden;
mod hotplug;
mod leaks;
mod nbd_device;
mod numa;
mod placement;
mod ring_limits;
mod stopped;
mod switch_race;
