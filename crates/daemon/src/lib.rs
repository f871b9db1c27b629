//! A process that serves disks, beside the serving itself: how it is started, found, told what to
//! do, confined, kept alive, replaced and ended.
//!
//! Promises: nothing here is on the path of a request. Every failure has an exit code
//! ([`failure::Exit`]) and says what the user can do; nothing that comes from a socket, the
//! environment or another process ends in a panic.
//!
//! ```
//! use ringdisk_daemon::failure::{Exit, Failure};
//! use ringdisk_daemon::size::{parse_size, parse_time};
//!
//! assert_eq!(parse_size("1.5K")?, 1536);
//! assert_eq!(parse_time("250us")?.as_micros(), 250);
//! let failure = Failure::new(Exit::Usage, parse_size("a lot").unwrap_err()).hint("see --help");
//! assert_eq!(failure.exit.code(), 2);
//! # Ok::<(), String>(())
//! ```
//!
//! Modules use those above them in this list, never those below:
//! - [`failure`], [`size`], [`timestamp`], [`log_target`], [`terminal`]: errors with exit codes,
//!   numbers, times and text for people, and where messages go;
//! - [`limits`], [`io_flusher`], [`signals`], [`stopping`], [`directory_lock`], [`mount_lock`],
//!   [`mount_users`]: one system facility each;
//! - [`stats`], [`metrics`], [`topology`]: counters and places of threads, as text, JSON and for
//!   Prometheus;
//! - [`notify`]: what service managers are told;
//! - [`helper`]: the process that acts for a confined one, and how this program is started anew;
//!   [`background`] starts it so for `--daemonize`;
//! - [`confine`]: the sandbox; [`new_file`], [`pidfile`], [`mountpoint`]: names that go at the end;
//! - [`control`]: control sockets, and the registry in which they are found; [`sockets`]: those of
//!   front ends; [`run_as`]: the user that a process serves as; [`unmount`]: the end of a mount of
//!   any process;
//! - [`watchdog`]: says to a manager that queue threads answer;
//! - [`processes`], [`rates`]: all disks that are served on this machine, and what they do;
//! - [`keep`] and [`upgrade`]: how a successor goes on with what a process served.

#![forbid(unsafe_code)]

pub mod background;
pub mod confine;
pub mod control;
pub mod directory_lock;
pub mod failure;
pub mod helper;
pub mod io_flusher;
pub mod job_text;
pub mod keep;
pub mod limits;
pub mod log_target;
pub mod metrics;
pub mod mount_lock;
pub mod mount_users;
pub mod mountpoint;
pub mod new_file;
pub mod notify;
mod pid_text;
pub mod pidfile;
pub mod processes;
pub mod rates;
pub mod run_as;
pub mod signals;
pub mod size;
pub mod sockets;
pub mod stats;
pub mod stopping;
pub mod terminal;
pub mod timestamp;
pub mod topology;
pub mod unmount;
pub mod upgrade;
pub mod watchdog;
