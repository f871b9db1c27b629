//! Where NBD clients connect: from the words to listening sockets.
//!
//! Promises: what was made goes again when a later address cannot be had; descriptors that the
//! process is started with are taken before it opens any of its own.

use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use ringdisk_daemon::control::address;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::sockets::{self, GivenListener, MadeSocket, Opened, SocketOptions};
use ringdisk_daemon::terminal;
use ringdisk_vhost::Listen;

use crate::cli::{Address, ServeArgs};

/// Where clients connect.
pub(in crate::commands::serve) struct Listening {
    pub(in crate::commands::serve) listeners: Vec<OwnedFd>,
    pub(in crate::commands::serve) made: Vec<MadeSocket>,
    /// As users know them.
    pub(in crate::commands::serve) shown: Vec<String>,
    /// The path of the first socket that has one: `ringdisk ctl` finds the disk by it.
    pub(in crate::commands::serve) path: Option<PathBuf>,
    /// The name of the first address of TCP ([`address::name_of`]).
    address: Option<PathBuf>,
}

/// An address before anything is made.
pub(in crate::commands::serve) enum Where {
    Unix(sockets::Place),
    Tcp(Address),
    Given(GivenListener),
}

/// Errors: paths that cannot be.
pub(in crate::commands::serve) fn places(args: &ServeArgs) -> Result<Vec<Where>, Failure> {
    let names = args.nbd.nbd.iter().filter_map(|address| match address {
        Address::Given(name) => Some(name.as_str()),
        _ => None,
    });
    let mut given = sockets::take_listeners(names)?.into_iter();
    let socket = &args.socket();
    let mut place = |address: &Address| match address {
        Address::Unix(path) => {
            let options = SocketOptions {
                make: Some(path.clone()),
                mode: socket.socket_mode,
                group: socket.socket_group.clone(),
                ..SocketOptions::default()
            };
            let mut places = sockets::places(&[options], vec![None])?;
            places.pop().map(Where::Unix).ok_or_else(|| Failure::new(Exit::General, "no place"))
        }
        Address::Tcp { .. } => Ok(Where::Tcp(address.clone())),
        Address::Given(_) => {
            given.next().map(Where::Given).ok_or_else(|| Failure::new(Exit::General, "no place"))
        }
    };
    args.nbd.nbd.iter().map(&mut place).collect()
}

/// Makes all sockets.
///
/// Errors: an address is in use, or cannot be listened on; what was made goes again.
pub(in crate::commands::serve) fn listen(
    places: Vec<Where>,
    is_encrypted: bool,
) -> Result<Listening, Failure> {
    let way_out = Some("--tls-creds changes that").filter(|_| !is_encrypted);
    let mut listening = Listening {
        listeners: Vec::new(),
        made: Vec::new(),
        shown: Vec::new(),
        path: None,
        address: None,
    };
    for place in places {
        match place {
            Where::Unix(place) => {
                let shown = place.shown();
                let Opened { listen, path, made } = place.open()?;
                if let Listen::Listener(listener) = listen {
                    listening.listeners.push(listener);
                }
                listening.shown.push(shown);
                listening.made.extend(made);
                listening.path = listening.path.or(path);
            }
            Where::Tcp(at) => {
                listening.listeners.extend(listen_on(&at, way_out)?);
                let name = || address::name_of(Path::new(&at.to_string()));
                listening.address = listening.address.or_else(name);
                listening.shown.push(format!("at {at}"));
            }
            Where::Given(GivenListener { socket, path, shown }) => {
                listening.listeners.push(socket);
                let name = || address::name_of(Path::new(&shown));
                listening.address = listening.address.or_else(name);
                listening.shown.push(format!("at {shown}"));
                listening.path = listening.path.or(path);
            }
        }
    }
    Ok(listening)
}

/// Listens on all addresses of a host that there are here.
///
/// * `way_out`: what to do about connections that are not encrypted; `None`: all are.
pub(in crate::commands) fn listen_on(
    address: &Address,
    way_out: Option<&str>,
) -> Result<Vec<OwnedFd>, Failure> {
    let Address::Tcp { host, port } = address else { return Ok(Vec::new()) };
    let cannot = |error: &std::io::Error| {
        let exit = match error.kind() {
            std::io::ErrorKind::AddrInUse => Exit::Locked,
            std::io::ErrorKind::PermissionDenied => Exit::Permission,
            _ => Exit::Mountpoint,
        };
        Failure::system(format!("cannot listen at {address}"), error, exit)
    };
    let found = (host.as_str(), *port).to_socket_addrs().map_err(|error| cannot(&error))?;
    let (mut listeners, mut why) = (Vec::new(), None);
    for found in found {
        match TcpListener::bind(found) {
            Ok(listener) => {
                if let Some(way_out) = way_out.filter(|_| !found.ip().is_loopback()) {
                    terminal::warn(format_args!(
                        "{found} is no loopback address: anybody who reaches it can use the disk, \
                         without encryption and without a password; {way_out}"
                    ));
                }
                listeners.push(OwnedFd::from(listener));
            }
            // A host may have an address of a family that is not there.
            Err(error) => why = Some(error),
        }
    }
    match why {
        Some(error) if listeners.is_empty() => Err(cannot(&error)),
        _ => Ok(listeners),
    }
}

impl Listening {
    /// What `ringdisk ctl` finds the disks by: the first Unix socket, or else the first address of
    /// TCP.
    pub(super) fn target(&self) -> Option<PathBuf> {
        self.path.clone().or_else(|| self.address.clone())
    }
}
