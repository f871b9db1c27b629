//! What a process may still do once it serves.
//!
//! Promises: [`Plan::enter`] takes everything away that the plan does not name, from every thread
//! of the process and for good, and says what came of it; what the kernel does not offer is told,
//! or an error where it was insisted on. Called once, when all that needs more has been done.
//!
//! Four walls, each for what the others do not see:
//! - **landlock**: which files may be opened, and no TCP;
//! - **seccomp**: which system calls may be made at all ([`calls`]);
//! - **capabilities**: of root's powers only those that the plan keeps, or another user ([`User`]),
//!   who has none;
//! - **rings**: what an io_uring may do is restricted when it is made (`ringdisk-ring`), and none
//!   can be made inside.
//!
//! This crate knows nothing of disks: what is needed is the plan of its caller.
#![deny(unsafe_code)]

pub mod calls;
mod capabilities;
mod files;
mod plan;
mod threads;
mod user;

pub use calls::Calls;
pub use capabilities::Keep;
pub use plan::{Failure, InForce, Plan};
pub use rustix::thread::CapabilitySet;
pub use user::{User, become_user};
