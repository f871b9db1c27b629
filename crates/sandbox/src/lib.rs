//! Confines a serving process to what its plan allows: files, system calls, capabilities.
//!
//! ```no_run
//! use ringdisk_sandbox::Plan;
//!
//! # fn main() -> Result<(), ringdisk_sandbox::Failure> {
//! // Everything is open and every thread runs that needs more than this.
//! let plan = Plan::new().read_write("/images/disk.qcow2").read_below("/images");
//! let in_force = plan.enter()?;
//! println!("sandbox: {in_force}");
//! for missing in &in_force.missing {
//!     eprintln!("not confined: {missing}");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Promises: [`Plan::enter`] takes everything away that the plan does not name, from every thread
//! of the process, permanently, and reports the result; a part that the kernel does not offer is
//! reported, or is an error if it was required ([`Plan::insist`]). Called once, after all work that
//! needs more.
//!
//! Four parts, each for what the others do not cover:
//! - **landlock**: which files may be opened, and no TCP;
//! - **seccomp**: which system calls may be made ([`calls`]);
//! - **capabilities**: of root's powers only those that the plan keeps, or another user ([`User`]),
//!   who has none;
//! - **rings**: the operations of an io_uring are restricted when it is made (`ringdisk-ring`), and
//!   none can be made inside.
//!
//! This crate knows nothing of disks: the caller's plan names all needs.
//!
//! Modules use one another in one direction only: plan ► files, calls, capabilities ► threads ►
//! user.
#![deny(unsafe_code)]

pub mod calls;
mod capabilities;
mod failure;
mod files;
mod plan;
mod threads;
mod user;

pub use calls::Calls;
pub use capabilities::Keep;
pub use failure::Failure;
pub use plan::{InForce, Plan, become_user};
pub use rustix::thread::CapabilitySet;
pub use user::User;
