//! Capabilities: the powers of root that are kept.
//!
//! Promises: only capabilities that the process has are kept.

use rustix::thread::{CapabilitySet, capabilities};

/// Capabilities that are kept where the process has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep(pub CapabilitySet);

/// Names, for messages; the others are never kept.
const NAMES: [(CapabilitySet, &str); 6] = [
    (CapabilitySet::DAC_OVERRIDE, "dac_override"),
    (CapabilitySet::FOWNER, "fowner"),
    (CapabilitySet::IPC_LOCK, "ipc_lock"),
    (CapabilitySet::SYS_ADMIN, "sys_admin"),
    (CapabilitySet::SYS_NICE, "sys_nice"),
    (CapabilitySet::SYS_RESOURCE, "sys_resource"),
];

impl Default for Keep {
    /// Needed to serve images:
    /// - `CAP_DAC_OVERRIDE`: images belong to others than root, and are opened again when a command
    ///   changes the chain; landlock restricts which ones;
    /// - `CAP_SYS_RESOURCE`: writes are not limited by a quota of the owner;
    /// - `CAP_IPC_LOCK`: memory of buffers that are registered later is not counted against
    ///   RLIMIT_MEMLOCK.
    fn default() -> Keep {
        Keep(CapabilitySet::DAC_OVERRIDE | CapabilitySet::SYS_RESOURCE | CapabilitySet::IPC_LOCK)
    }
}

impl Keep {
    /// Those of them that this process has.
    pub(crate) fn present(self) -> CapabilitySet {
        capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.permitted & self.0)
    }
}

/// As text.
pub(crate) fn describe(set: CapabilitySet) -> String {
    let names: Vec<&str> =
        NAMES.iter().filter(|(each, _)| set.contains(*each)).map(|(_, name)| *name).collect();
    if names.is_empty() { String::from("none") } else { names.join(" ") }
}
