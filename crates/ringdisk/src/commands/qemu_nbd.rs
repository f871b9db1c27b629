//! `ringdisk nbd`, and this program under the name `qemu-nbd`: the command line of `qemu-nbd`.
//!
//! Promises: what is asked for is done by `ringdisk serve --nbd`, whose words are made from those
//! of `qemu-nbd`; errors have the texts of `qemu-nbd` where programs look for them, and the exit
//! code is 0 or 1.

mod device;
mod list;
mod netlink;
mod server;
mod words;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use clap::Parser;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper::start::Role;
use ringdisk_daemon::{limits, terminal};
use ringdisk_nbd::TlsSource;
use ringdisk_qemu_nbd::{Endpoint, Invocation, Listen, Serve, help, parse, tls, version};
use ringdisk_storage::NbdAddress;

use crate::cli::{Cli, Command, NbdAccessArgs, VerifyWord};
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
    if let Some(text) = asked.said_place.filter(|_| is_activated) {
        return Err(String::from(text));
    }
    if asked.device.is_some() && asked.tls.credentials.is_some() {
        return Err(String::from("TLS is not supported with a host device"));
    }
    if let Some(device) = asked.device.as_deref().filter(|_| !Role::Device.is_ours()) {
        return device::connect(asked, device);
    }
    let words = words::of_serve(asked, is_activated)?;
    let cli = Cli::try_parse_from(words).map_err(|error| usage(&error))?;
    let Command::Serve(mut args) = cli.command else { return Err(String::from("no disk")) };
    if let Some(label) = &asked.selinux_label {
        label_sockets(label)?;
    }
    args.nbd.is_quiet = true;
    args.nbd.is_for_a_device = asked.device.is_some();
    args.nbd.keeps_output = args.nbd.is_for_a_device && asked.verbose;
    of_tls(asked, &mut args.nbd.access)?;
    log::start(cli.verbose, true);
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
    let verify = if meant.verify_peer { VerifyWord::Yes } else { VerifyWord::No };
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
        Some(_) => {
            Err(String::from("qemu-nbd does not support socket activation with LISTEN_FDS > 1"))
        }
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
    std::fs::write("/proc/thread-self/attr/sockcreate", label).map_err(|error| {
        let error = ringdisk_daemon::failure::words(&error);
        format!("Cannot set SELinux socket create context to {label}: {error}")
    })
}

/// A failure in the words of `qemu-nbd`.
fn text(asked: &Serve, failure: &Failure) -> String {
    let file = asked.images.file.to_string_lossy();
    let message = failure.message();
    let opened = |why: String| format!("Failed to blk_new_open '{file}': {why}");
    match failure.exit {
        _ if message.starts_with("Bitmap '") => {
            // The image is known to who started this.
            let (text, _) = message.split_once(" in '").unwrap_or((message, ""));
            text.to_owned()
        }
        _ if message.contains(": not a qcow2 image") => {
            opened(String::from("Image is not in qcow2 format"))
        }
        _ if message.starts_with("cannot create PID file: ") => {
            message.replacen("cannot create PID file: ", "Could not create ", 1)
        }
        _ if message.contains("Failed to load snapshot:") => {
            String::from("Failed to load snapshot: Can't find snapshot")
        }
        _ if let Listen::Unix(path) = &asked.listen
            && path.parent().is_some_and(|parent| !parent.exists()) =>
        {
            format!("Failed to bind socket to {}: No such file or directory", path.display())
        }
        _ if message.starts_with("cannot listen at") => match &asked.listen {
            Listen::Tcp(_) if failure.exit == Exit::Locked => {
                String::from("Failed to find an available port: Address already in use")
            }
            Listen::Tcp(_) if message.contains("lookup address") => {
                let (place, why) = message.split_once(": ").unwrap_or((message, ""));
                let place = place.trim_start_matches("cannot listen at ");
                let why = why.rsplit(": ").next().unwrap_or(why);
                format!("address resolution failed for {place}: {why}")
            }
            _ => message.to_owned(),
        },
        Exit::Locked if !names_socket(&asked.listen, message) => {
            let kind = if asked.read_only { "shared \"write\"" } else { "\"write\"" };
            let lock = format!("Failed to get {kind} lock");
            opened(format!("{lock}\nIs another process using the image [{file}]?"))
        }
        Exit::Image
            if !Path::new(&asked.images.file).exists()
                && !NbdAddress::is_meant(asked.images.file.as_bytes()) =>
        {
            opened(format!("Could not open '{file}': No such file or directory"))
        }
        Exit::Image => opened(message.to_owned()),
        Exit::Permission if message.contains(file.as_ref()) => {
            opened(format!("Could not open '{file}': Permission denied"))
        }
        _ => message.to_owned(),
    }
}

/// Whether a message is about the Unix socket.
fn names_socket(listen: &Listen, message: &str) -> bool {
    matches!(listen, Listen::Unix(path) if message.contains(path.to_string_lossy().as_ref()))
}
