//! Sockets that the process was started with: `--socket-fd` and those of a service manager.
//!
//! Promises: each is a Unix stream socket, is close-on-exec from now on, and belongs to one disk.
//! Called before the program opens any of its own.
//!
//! Source: sd_listen_fds(3).

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use ringdisk_fuse::mount::inherited;
use rustix::io::Errno;
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, getpeername, getsockname};

use super::SocketOptions;
use crate::control::registry::real_path;
use crate::failure::{Exit, Failure, words};
use crate::terminal::visible;

/// A socket that was there when the process was started.
#[derive(Debug)]
pub struct Inherited {
    /// The socket.
    pub socket: OwnedFd,
    /// It listens; else it is connected.
    pub listens: bool,
    /// What it is bound to.
    pub path: Option<PathBuf>,
    /// For messages.
    pub display_name: String,
}

/// The inherited sockets of the disks; `None` for those that have another place.
///
/// Errors: a descriptor that is no such socket; not as many sockets of a service manager as disks
/// that want one.
pub fn take(disks: &[SocketOptions]) -> Result<Vec<Option<Inherited>>, Failure> {
    // All of them: what is not used must not stay open where a child would have it.
    let mut given = inherited::take("");
    let mut all = Vec::new();
    for disk in disks {
        all.push(match disk.descriptor {
            None => None,
            Some(number) => {
                let from_manager = given.is_empty();
                let socket = if from_manager { inherited::take_socket(number) } else { None };
                let socket = socket.ok_or_else(|| no_socket(number, !from_manager))?;
                Some(look(socket, format!("descriptor {number}"))?)
            }
        });
    }
    // Names first: what is left over is for those without.
    for named in [true, false] {
        for (disk, place) in disks.iter().zip(&mut all) {
            let wants = disk.make.is_none() && disk.connect.is_none() && disk.descriptor.is_none();
            if !wants || disk.name.is_some() != named {
                continue;
            }
            if let Some((name, socket)) = pick(&mut given, disk.name.as_deref())? {
                let display_name = match name.as_str() {
                    "" => String::from("a socket of the service manager"),
                    name => format!("the socket '{}' of the service manager", visible(name)),
                };
                *place = Some(look(socket, display_name)?);
            }
        }
    }
    if let [(name, _), ..] = given.as_slice() {
        return Err(Failure::new(
            Exit::Usage,
            format!(
                "the service manager passes {} more than there are disks for{}",
                if given.len() == 1 { "one socket" } else { "sockets" },
                if name.is_empty() {
                    String::new()
                } else {
                    format!(", such as '{}'", visible(name))
                },
            ),
        )
        .hint("give a --disk for each, or --socket-name"));
    }
    Ok(all)
}

/// A listening socket of a Unix or an Internet address that was there when the process was started.
#[derive(Debug)]
pub struct GivenListener {
    /// The socket.
    pub socket: OwnedFd,
    /// What it is bound to, where that is a path.
    pub path: Option<PathBuf>,
    /// For messages.
    pub display_name: String,
}

/// Listening sockets by their numbers, or by the names that the service manager gives them.
///
/// Errors: there is none of that number or name, or it does not listen.
pub fn take_listeners<'a>(
    words: impl Iterator<Item = &'a str>,
) -> Result<Vec<GivenListener>, Failure> {
    let mut given: Option<Vec<(String, OwnedFd)>> = None;
    let mut all = Vec::new();
    for word in words {
        let given = given.get_or_insert_with(|| inherited::take(""));
        let (socket, display_name) = match word.parse::<i32>() {
            Ok(number) => {
                let place = given.iter().position(|(_, socket)| socket.as_raw_fd() == number);
                let socket = match place {
                    Some(place) => Some(given.remove(place).1),
                    None => inherited::take_socket(number),
                };
                let display_name = format!("descriptor {number}");
                let missing = || {
                    Failure::new(
                        Exit::Usage,
                        format!("{display_name} is no socket of this process"),
                    )
                    .hint("the process that starts this one passes it without close-on-exec")
                };
                (socket.ok_or_else(missing)?, display_name)
            }
            Err(_) => match pick(given, Some(word))? {
                Some((name, socket)) => {
                    let name = visible(&name);
                    (socket, format!("the socket '{name}' of the service manager"))
                }
                None => continue,
            },
        };
        if socket_type(&socket) != Ok(SocketType::STREAM) || socket_acceptconn(&socket) != Ok(true)
        {
            let text = format!("{display_name} is no stream socket that listens");
            return Err(Failure::new(Exit::Usage, text));
        }
        let is_unix = socket_domain(&socket) == Ok(AddressFamily::UNIX);
        let path = is_unix.then(|| bound_to(&socket)).flatten();
        let display_name = match &path {
            Some(path) => path.display().to_string(),
            None => local_address(&socket).unwrap_or(display_name),
        };
        all.push(GivenListener { socket, path, display_name });
    }
    Ok(all)
}

/// The socket of this name, or the first one.
fn pick(
    given: &mut Vec<(String, OwnedFd)>,
    name: Option<&str>,
) -> Result<Option<(String, OwnedFd)>, Failure> {
    let Some(wanted) = name else {
        return Ok((!given.is_empty()).then(|| given.remove(0)));
    };
    match given.iter().position(|(name, _)| name == wanted) {
        Some(place) => Ok(Some(given.remove(place))),
        None => {
            let names: Vec<String> =
                given.iter().map(|(name, _)| format!("'{}'", visible(name))).collect();
            let there = if names.is_empty() { String::from("none") } else { names.join(", ") };
            Err(Failure::new(
                Exit::Usage,
                format!(
                    "the service manager passes no socket named '{}'; there is {there}",
                    visible(wanted)
                ),
            )
            .hint(format!("FileDescriptorName={wanted} in the socket unit")))
        }
    }
}

fn no_socket(number: i32, has_manager: bool) -> Failure {
    if has_manager {
        return Failure::new(
            Exit::Usage,
            format!(
                "descriptor {number} cannot be used: the service manager passes sockets, and \
                these have names"
            ),
        )
        .hint("leave --socket-fd out, or use --socket-name");
    }
    Failure::new(Exit::Usage, format!("descriptor {number} is no socket of this process")).hint(
        "the process that starts this one passes it without close-on-exec; or use \
            --vhost-user-blk SOCKET",
    )
}

/// What kind of socket it is.
///
/// Errors: none of ours.
fn look(socket: OwnedFd, display_name: String) -> Result<Inherited, Failure> {
    let refuse = |why: &str| {
        Failure::new(Exit::Usage, format!("{display_name} {why}"))
            .hint("a Unix stream socket that listens or is connected is needed")
    };
    if socket_domain(&socket) != Ok(AddressFamily::UNIX)
        || socket_type(&socket) != Ok(SocketType::STREAM)
    {
        return Err(refuse("is no Unix stream socket"));
    }
    let listens = socket_acceptconn(&socket).map_err(|errno| refuse(&words(&errno.into())))?;
    if !listens && getpeername(&socket).is_err_and(|errno| errno == Errno::NOTCONN) {
        return Err(refuse("neither listens nor is connected"));
    }
    let path = listens.then(|| bound_to(&socket)).flatten();
    Ok(Inherited { socket, listens, path, display_name })
}

/// The address of TCP that a socket is bound to: `127.0.0.1:10809`.
fn local_address(socket: &OwnedFd) -> Option<String> {
    let address = std::net::SocketAddr::try_from(getsockname(socket).ok()?).ok()?;
    Some(address.to_string())
}

/// The path of a socket, if it has one that does not depend on a current directory.
fn bound_to(socket: &OwnedFd) -> Option<PathBuf> {
    let address = SocketAddrUnix::try_from(getsockname(socket).ok()?).ok()?;
    let path = PathBuf::from(std::ffi::OsString::from(address.path()?.to_str().ok()?));
    path.is_absolute().then(|| real_path(&path).ok()).flatten()
}
