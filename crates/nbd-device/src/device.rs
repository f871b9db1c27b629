//! `qemu-nbd -c` and `-d`: a disk as a device `/dev/nbdN` of the kernel.
//!
//! Promises: when `-c` returns, the device is there with its partitions; when `-d` returns, the
//! image is closed. A device is left without a server only by a kill of both processes below.
//!
//! Processes: the one that was started waits until the device is there. In the background (with
//! `-v` in its place) the *parent* starts the server, which is confined as every server, connects
//! the device to it, waits for its end, and disconnects the device. The kernel ends the server's
//! connections when the device is disconnected, and the server ends with the last of them.

use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::Duration;

use ringdisk_daemon::background::{self, Background, Started};
use ringdisk_daemon::failure::{Exit, words};
use ringdisk_daemon::helper::start::Role;
use ringdisk_daemon::terminal;
use ringdisk_nbd_protocol::numbers::{export_flags, option};
use ringdisk_qemu_nbd::{Listen, Serve};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat, major, minor};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::netlink::{Device, Kernel};
use crate::server::{Server, unix};

/// The exit code of everything that goes wrong.
const FAILED: u8 = 1;

/// Where the server's socket is without `-k`; the name of the device follows.
const SOCKET_PREFIX: &str = "/var/lock/qemu-nbd-";
/// Logical blocks of a device, bytes, as with `qemu-nbd`.
const BLOCK_BYTES: u64 = 512;
/// Most connections of a device: each has a queue of 128 requests.
const CONNECTIONS_MAX: usize = 4;
/// A server that is on this machine and does not answer is slow, not gone: the kernel would send
/// the request on another connection, and the first one may still be carried out later. So this is
/// longer than any storage takes; the end of the server is seen at once all the same.
const TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// A parent may take so long for its end after the device was disconnected.
const END_LIMIT: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// In front of the parent's pid in what the kernel knows of the server of a device.
const BACKEND: &str = "ringdisk:";

/// Connections of a device: one for each CPU, up to [`CONNECTIONS_MAX`].
pub fn connections() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(CONNECTIONS_MAX)
}

/// Where the server of a device listens.
pub fn listen(device: &Path, listen: &Listen) -> Listen {
    match listen {
        Listen::Unix(path) => Listen::Unix(path.clone()),
        Listen::Tcp(_) => {
            let name = device.file_name().unwrap_or_default().to_string_lossy();
            Listen::Unix(PathBuf::from(format!("{SOCKET_PREFIX}{name}")))
        }
    }
}

/// Connects a device to a server of its own. Gives the exit code: at once when the server is in the
/// background, else at its end.
///
/// Errors: the text for people.
pub fn connect(asked: &Serve, device: &Path) -> Result<u8, String> {
    let index =
        index_of(device).map_err(|why| format!("Failed to open {}: {why}", printable(device)))?;
    let kernel = Kernel::open().map_err(no_kernel)?;
    if is_connected(index) {
        return Err(in_use(device));
    }
    let background = if asked.verbose {
        None
    } else if Role::Background.is_ours() {
        Some(Background::enter().map_err(|failure| failure.message().to_owned())?)
    } else {
        return background::run_child().map_err(|failure| failure.message().to_owned());
    };
    let started = background::start(Role::Device).map_err(|error| words(&error))?;
    let mut server = match started {
        Started::Ready(child) => child,
        // It has said why.
        Started::Ended(_) => return Ok(FAILED),
    };
    let ends = Ends::of(&server);
    let backend = format!("{BACKEND}{}", std::process::id());
    if let Err(why) = hand_over(asked, device, index, &kernel, &backend) {
        ends.end();
        let _ = server.wait();
        return Err(why);
    }
    // The partitions are looked for when it is opened.
    let _ = File::open(device);
    match background {
        Some(background) => background.ready(),
        None => terminal::say_error(format_args!(
            "NBD device {} is now connected to {}",
            printable(device),
            asked.images.file.to_string_lossy()
        )),
    }
    ends.on_signals();
    let status = server.wait().map_err(|error| words(&error))?;
    // Another server may have it by now.
    if backend_of(index).is_some_and(|now| now == backend) {
        let _ = kernel.disconnect(index);
    }
    Ok(if status.success() { Exit::Clean.code() } else { FAILED })
}

/// Connects to the server, and gives the connections to the kernel.
fn hand_over(
    asked: &Serve,
    device: &Path,
    index: u32,
    kernel: &Kernel,
    backend: &str,
) -> Result<(), String> {
    let Listen::Unix(path) = listen(device, &asked.listen) else {
        return Err(String::from("the server has no Unix socket"));
    };
    let mut connected: Vec<UnixStream> = Vec::new();
    let mut described = None;
    for _ in 0..connections() {
        let failed = |why: String| format!("Failed to connect to '{}': {why}", path.display());
        let stream = unix(&path).map_err(|error| failed(words(&error)))?;
        let mut server = Server(Some(stream));
        server.greet().map_err(failed)?;
        let known = server.export(option::GO, asked.name.as_bytes()).map_err(failed)?;
        let Some(export) = known.export else {
            return Err(failed(format!("there is no export '{}'", asked.name)));
        };
        described = Some(export);
        connected.extend(server.0);
        if export.flags & export_flags::CAN_MULTI_CONN == 0 {
            break;
        }
    }
    let Some(export) = described else { return Ok(()) };
    for stream in &connected {
        // The kernel waits for requests as long as there are none.
        let _ = stream.set_read_timeout(None).and(stream.set_write_timeout(None));
    }
    let wanted = Device {
        index,
        size: export.size - export.size % BLOCK_BYTES,
        block_bytes: BLOCK_BYTES,
        flags: export.flags,
        timeout: TIMEOUT,
        backend,
    };
    kernel.connect(&wanted, &connected).map_err(|errno| match errno {
        Errno::BUSY => in_use(device),
        errno => format!("Failed to set NBD socket: {}", words(&errno.into())),
    })
}

/// Disconnects a device.
///
/// Errors: the text for people.
pub fn disconnect(device: &Path) -> Result<u8, String> {
    let index =
        index_of(device).map_err(|why| format!("Cannot open {}: {why}", printable(device)))?;
    let kernel = Kernel::open().map_err(no_kernel)?;
    let parent = backend_of(index).and_then(|name| {
        let pid = name.strip_prefix(BACKEND)?.parse().ok()?;
        pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()
    });
    let failed =
        |errno: Errno| format!("Cannot disconnect {}: {}", printable(device), words(&errno.into()));
    kernel.disconnect(index).map_err(failed)?;
    if let Some(parent) = parent {
        // The image is closed when it has ended.
        let _ = poll(&mut [PollFd::new(&parent, PollFlags::IN)], Some(&END_LIMIT));
    }
    terminal::say(format_args!("{} disconnected", printable(device)));
    Ok(Exit::Clean.code())
}

/// Ends the server, also when this process is asked to end.
struct Ends(Option<rustix::fd::OwnedFd>);

impl Ends {
    fn of(server: &Child) -> Ends {
        let pid = i32::try_from(server.id()).ok().and_then(Pid::from_raw);
        Ends(pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()))
    }

    fn end(&self) {
        if let Some(server) = &self.0 {
            let _ = pidfd_send_signal(server, Signal::TERM);
        }
    }

    /// From now on signals that end a process end the server, and with it this process.
    fn on_signals(self) {
        if let Ok(mut signals) = Signals::new([SIGTERM, SIGINT, SIGHUP]) {
            thread::spawn(move || signals.forever().for_each(|_| self.end()));
        }
    }
}

/// N of a device `/dev/nbdN`, whatever its name here.
///
/// Errors: why it is none.
fn index_of(device: &Path) -> Result<u32, String> {
    let opened = File::options().read(true).write(true).open(device);
    let opened = opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            format!("{}\nIf there are no such devices: `modprobe nbd`", words(&error))
        }
        _ => words(&error),
    })?;
    let stat = fstat(&opened).map_err(|errno| words(&errno.into()))?;
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    let numbers = format!("{}:{}", major(stat.st_rdev), minor(stat.st_rdev));
    let name = fs::canonicalize(format!("/sys/dev/block/{numbers}")).ok().filter(|_| is_device);
    let name = name.as_deref().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
    let index = name.strip_prefix("nbd").and_then(|index| index.parse().ok());
    index.ok_or_else(|| String::from("it is no NBD device of the kernel"))
}

/// Whether a device has a server.
fn is_connected(index: u32) -> bool {
    Path::new(&format!("/sys/block/nbd{index}/pid")).exists()
}

/// What the kernel was told of the server of a device.
fn backend_of(index: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/sys/block/nbd{index}/backend")).ok()?;
    Some(name.trim_end().to_owned())
}

fn in_use(device: &Path) -> String {
    format!("Failed to set NBD socket: {} has a server already", printable(device))
}

fn no_kernel(errno: Errno) -> String {
    match errno {
        Errno::NOENT => String::from("this kernel has no NBD devices: `modprobe nbd`"),
        errno => format!("cannot ask the kernel for NBD devices: {}", words(&errno.into())),
    }
}

fn printable(device: &Path) -> impl std::fmt::Display {
    terminal::visible(&device.to_string_lossy()).to_string()
}
