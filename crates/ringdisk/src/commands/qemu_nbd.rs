//! `ringdisk nbd`, and this program under the name `qemu-nbd`: the command line of `qemu-nbd`.
//!
//! Promises: what is asked for is done by `ringdisk serve --nbd`, whose words are made from those
//! of `qemu-nbd`; errors have the texts of `qemu-nbd` where programs look for them, and the exit
//! code is 0 or 1.

mod words;

use std::ffi::OsString;
use std::path::Path;

use clap::Parser;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper::start::Role;
use ringdisk_daemon::{limits, terminal};
use ringdisk_nbd::{TlsSource, VerifyPeer};
use ringdisk_nbd_device::{device, list};
use ringdisk_qemu_nbd::nbd_texts;
use ringdisk_qemu_nbd::{Endpoint, Invocation, Listen, Serve, help, parse, tls, version};

use crate::cli::{Cli, Command, NbdAccessArgs};
use crate::log;

/// The exit code of everything that goes wrong.
const FAILED: u8 = 1;

/// The name of `qemu-nbd`.
pub(crate) const NAME: &str = "qemu-nbd";

/// Whether this program was started under the name of `qemu-nbd`.
pub(crate) fn is_named_so(program: &std::ffi::OsStr) -> bool {
    Path::new(program).file_name().is_some_and(|name| name == NAME)
}

/// Does what the words say. Gives the exit code.
///
/// * `program`: the name under which `qemu-nbd` was started; messages begin with its last part.
pub(crate) fn run(program: &str, words: impl IntoIterator<Item = OsString>) -> u8 {
    let short = Path::new(program).file_name().map_or(NAME.into(), |name| name.to_string_lossy());
    let result = match parse(program, words) {
        Err(error) => {
            terminal::say_error(error);
            return FAILED;
        }
        Ok(Invocation::Help) => {
            terminal::say(help(program).trim_end());
            Ok(Exit::Clean.code())
        }
        Ok(Invocation::Version) => {
            terminal::say(version(program, env!("CARGO_PKG_VERSION")).trim_end());
            Ok(Exit::Clean.code())
        }
        Ok(Invocation::Serve(asked)) => serve(&asked),
        Ok(Invocation::List(asked)) => list::list(&asked).map(|()| Exit::Clean.code()),
        Ok(Invocation::Disconnect(device)) => device::disconnect(&device),
    };
    match result {
        Ok(0) => 0,
        Ok(_) => FAILED,
        Err(text) => {
            terminal::say_error(format_args!("{short}: {text}"));
            FAILED
        }
    }
}

/// Serves until the end. Gives the exit code.
///
/// Errors: the text for people, without the name of the program.
fn serve(asked: &Serve) -> Result<u8, String> {
    let is_activated = is_activated()?;
    nbd_texts::refuse_place(asked, is_activated)?;
    if let Some(device) = asked.device.as_deref().filter(|_| !Role::Device.is_ours()) {
        return device::connect(asked, device);
    }
    let listen = match &asked.device {
        Some(device) => device::listen(device, &asked.listen),
        None => asked.listen.clone(),
    };
    let listen = Some(&listen).filter(|_| !is_activated);
    nbd_texts::refuse(asked, listen)?;
    let words = words::of_serve(asked, listen);
    let cli = Cli::try_parse_from(words).map_err(|error| usage(&error))?;
    let Command::Serve(mut args) = cli.command else { return Err(String::from("no disk")) };
    if let Some(label) = &asked.selinux_label {
        label_sockets(label)?;
    }
    args.nbd.is_quiet = true;
    args.nbd.is_for_a_device = asked.device.is_some();
    args.nbd.keeps_output = args.nbd.is_for_a_device && asked.verbose;
    of_tls(asked, &mut args.nbd.access)?;
    // Callers kill servers, remove images before they end their server, and read standard error.
    terminal::be_terse();
    log::start_without(cli.verbose, ringdisk_disk::LOST_NAMES_TARGET);
    limits::raise();
    let mut disks = args.disks().map_err(|error| usage(&error))?;
    for disk in &mut disks {
        disk.args.nbd.allocation_depth = asked.allocation_depth;
        disk.args.nbd.shows_recording = true;
    }
    super::serve::run(&args, disks).map_err(|failure| text(asked, &failure))
}

/// What `--object` and `--tls-…` ask for.
///
/// Errors: as [`tls`].
fn of_tls(asked: &Serve, access: &mut NbdAccessArgs) -> Result<(), String> {
    let Some(meant) = tls(&asked.tls, Endpoint::Server)? else { return Ok(()) };
    let verify = if meant.verify_peer { VerifyPeer::Yes } else { VerifyPeer::No };
    access.tls_creds = Some(TlsSource::Directory(meant.directory));
    access.tls_verify_peer = Some(verify);
    access.rules = meant.allow;
    Ok(())
}

/// Whether a service manager passes the listening socket: as descriptor 3.
///
/// Errors: it passes several.
fn is_activated() -> Result<bool, String> {
    let variable = |name| std::env::var(name).unwrap_or_default().parse::<u32>().ok();
    // In the background the process is started anew, with the socket.
    let process = match Role::Background.is_ours() {
        true => rustix::process::getppid().map(|process| process.as_raw_nonzero().get()),
        false => Some(rustix::process::getpid().as_raw_nonzero().get()),
    };
    let is_ours = variable("LISTEN_PID").is_some_and(|pid| process == i32::try_from(pid).ok());
    match variable("LISTEN_FDS").filter(|_| is_ours) {
        None | Some(0) => Ok(false),
        Some(1) => Ok(true),
        Some(_) => Err(String::from(nbd_texts::SEVERAL_SOCKETS)),
    }
}

/// The first line of what clap has to say.
fn usage(error: &clap::Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    first.strip_prefix("error: ").unwrap_or(first).to_owned()
}

/// The listening socket gets this label.
///
/// Source: `/proc/thread-self/attr/sockcreate` (proc(5)).
fn label_sockets(label: &str) -> Result<(), String> {
    std::fs::write("/proc/thread-self/attr/sockcreate", label)
        .map_err(|error| nbd_texts::of_label(label, &ringdisk_daemon::failure::words(&error)))
}

/// A failure in the words of `qemu-nbd`.
fn text(asked: &Serve, failure: &Failure) -> String {
    let directory = match &asked.listen {
        Listen::Unix(path) => path.parent().filter(|parent| !parent.as_os_str().is_empty()),
        Listen::Tcp(_) => None,
    };
    let is_nowhere = directory.is_some_and(|directory| !directory.exists());
    nbd_texts::of_failure(asked, failure, is_nowhere)
}
