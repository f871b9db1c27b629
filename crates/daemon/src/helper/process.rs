//! The helper process as a child of the server that it is for. A server with `--keep-mount` or
//! `--keep` starts none: its parent is the helper process ([`super::inherited`]).
//!
//! Promises: it holds no descriptor of a mount or of a terminal; it ends with its parent, and
//! signals to the group do not end it before that. One thread.

use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, parent_id};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::{env, io};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

use super::manager::Speaker;
use super::session;
use super::start::Role;

/// The service manager's socket, which the helper makes its own of.
const MANAGER: &str = "NOTIFY_SOCKET";

/// Starts one. Gives this process's end of the socket.
///
/// Errors: those of the system; without `/proc` it cannot be done.
pub(super) fn start() -> io::Result<(OwnedFd, Child)> {
    let (mut command, ours) = Role::Helper.command()?;
    // Of the environment only the mark goes on, and the manager's socket.
    let mark: Vec<_> = command
        .get_envs()
        .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())))
        .collect();
    let child = command
        .arg0("ringdisk-helper")
        .env_clear()
        .envs(mark)
        .envs(env::var_os(MANAGER).map(|name| (MANAGER, name)))
        .current_dir("/")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    Ok((ours, child))
}

/// Carries out the tasks of the parent, until the parent has ended. Returns the exit code.
pub fn run() -> u8 {
    let _ = rustix::thread::set_name(c"ringdisk-helper");
    // Away from the terminal's signals. Those that a service manager sends to all processes come
    // all the same, and the end of the parent is what counts.
    let _ = rustix::process::setsid();
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1] {
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let server = parent_id();
    match session::run(rustix::stdio::stdin(), server, &Speaker::new(server)) {
        // As when the parent is gone: there is nobody to tell.
        Ok(()) => 0,
        Err(error) => u8::from(error.kind() == io::ErrorKind::InvalidData),
    }
}
