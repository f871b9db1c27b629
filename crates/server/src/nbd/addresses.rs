//! Where NBD clients connect: from addresses to listening sockets.
//!
//! Promises: what was made goes again when a later address cannot be had; descriptors that the
//! process is started with are taken before it opens any of its own.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use ringdisk_daemon::control::address;
use ringdisk_daemon::control::registry::real_path;
use ringdisk_daemon::failure::{Cause, Exit, Failure};
use ringdisk_daemon::sockets::{self, Address, GivenListener, MadeSocket, Opened, SocketOptions};
use ringdisk_daemon::terminal;
use ringdisk_vhost::Listen;

use super::request::Request;

/// A port that was chosen at one address of a host, and is in use at another one: others are tried
/// so many times.
const PORTS_AGAIN: usize = 8;

/// Where clients connect.
#[derive(Default)]
pub(crate) struct Listening {
    pub(crate) listeners: Vec<OwnedFd>,
    pub(crate) made: Vec<MadeSocket>,
    /// The addresses, as messages name them.
    pub(crate) display_names: Vec<String>,
    /// The path of the first socket that has one: `ringdisk ctl` finds the disk by it.
    pub(crate) path: Option<PathBuf>,
    /// The name of the first address of TCP ([`address::name_of`]).
    address: Option<PathBuf>,
}

/// An address before anything is made.
#[derive(Debug)]
pub(crate) enum Where {
    Unix(sockets::Place),
    Tcp(Address),
    Given(GivenListener),
}

/// Errors: paths that cannot be.
pub(crate) fn places(request: &Request) -> Result<Vec<Where>, Failure> {
    let names = request.addresses.iter().filter_map(|address| match address {
        Address::Given(name) => Some(name.as_str()),
        _ => None,
    });
    let mut given = sockets::take_listeners(names)?.into_iter();
    let mut place = |address: &Address| match address {
        Address::Unix(path) => {
            let options = SocketOptions {
                make: Some(path.clone()),
                mode: request.socket_mode,
                group: request.socket_group.clone(),
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
    request.addresses.iter().map(&mut place).collect()
}

/// Makes all sockets.
///
/// Errors: an address is in use, or cannot be listened on; what was made goes again.
pub(crate) fn listen(places: Vec<Where>, is_encrypted: bool) -> Result<Listening, Failure> {
    let way_out = Some("--tls-creds changes that").filter(|_| !is_encrypted);
    let mut listening = Listening::default();
    for place in places {
        match place {
            Where::Unix(place) => {
                let display_name = place.display_name();
                let Opened { listen, path, made } = place.open()?;
                if let Listen::Listener(listener) = listen {
                    listening.listeners.push(listener);
                }
                listening.display_names.push(display_name);
                listening.made.extend(made);
                listening.path = listening.path.or(path);
            }
            Where::Tcp(at) => {
                let listeners = listen_on(&at, way_out)?;
                let at = with_port(at, &listeners);
                listening.listeners.extend(listeners);
                let name = || address::name_of(Path::new(&at.to_string()));
                listening.address = listening.address.or_else(name);
                listening.display_names.push(format!("at {at}"));
            }
            Where::Given(GivenListener { socket, path, display_name }) => {
                listening.listeners.push(socket);
                let name = || address::name_of(Path::new(&display_name));
                listening.address = listening.address.or_else(name);
                listening.display_names.push(format!("at {display_name}"));
                listening.path = listening.path.or(path);
            }
        }
    }
    Ok(listening)
}

/// The same sockets as another process had them, in the order of [`listen`]. Their names are
/// taken over by [`Listening::adopt`].
///
/// Errors: they are not those of these addresses.
pub(crate) fn taken(addresses: &[Address], listeners: Vec<OwnedFd>) -> Result<Listening, Failure> {
    let misfit = || {
        Failure::new(Exit::Unsupported, "the listening sockets are not those of the --nbd options")
    };
    let mut left: VecDeque<OwnedFd> = listeners.into();
    let mut listening = Listening::default();
    for address in addresses {
        let first = left.pop_front().ok_or_else(misfit)?;
        if rustix::net::sockopt::socket_acceptconn(&first) != Ok(true) {
            return Err(misfit());
        }
        let port = port_of(&first);
        let mut here = vec![first];
        match address {
            Address::Unix(path) if port.is_none() => {
                listening.display_names.push(format!("at {}", path.display()));
                listening.path = listening.path.or_else(|| real_path(path).ok());
            }
            Address::Tcp { host, port: wanted } if port.is_some() => {
                // A host may have several addresses, all with one port; and the next address may
                // have the same port at another host.
                let found = (host.as_str(), 0).to_socket_addrs();
                let found: Vec<IpAddr> =
                    found.into_iter().flatten().map(|address| address.ip()).collect();
                let is_here = |next: &OwnedFd| {
                    address_of(next)
                        .is_some_and(|it| Some(it.port()) == port && found.contains(&it.ip()))
                };
                while left.front().is_some_and(is_here) {
                    here.extend(left.pop_front());
                }
                if *wanted != 0 && Some(*wanted) != port {
                    return Err(misfit());
                }
                let at = with_port(address.clone(), &here);
                let name = || address::name_of(Path::new(&at.to_string()));
                listening.address = listening.address.or_else(name);
                listening.display_names.push(format!("at {at}"));
            }
            _ => return Err(misfit()),
        }
        listening.listeners.extend(here);
    }
    if left.is_empty() { Ok(listening) } else { Err(misfit()) }
}

/// What `ringdisk ctl`, and a process that takes the disks over, finds them by, as [`listen`] makes
/// it.
///
/// Errors: an address that does not say it.
pub(super) fn target_of(request: &Request) -> Result<PathBuf, Failure> {
    let path = request.addresses.iter().find_map(|address| match address {
        Address::Unix(path) => Some(path),
        _ => None,
    });
    if let Some(path) = path {
        return real_path(path).map_err(|error| {
            Failure::system(format!("cannot find '{}'", path.display()), &error, Exit::Mountpoint)
        });
    }
    let mut names = request.addresses.iter().map(|at| address::name_of(Path::new(&at.to_string())));
    names.find_map(|name| name).ok_or_else(|| {
        Failure::new(Exit::Usage, "--upgrade finds the disk by the path or the port of --nbd")
            .hint("name the port that is in use in place of 0")
    })
}

/// The address with the port that was found, where any free one was asked for.
fn with_port(address: Address, listeners: &[OwnedFd]) -> Address {
    match address {
        Address::Tcp { host, port: 0 } => {
            let port = listeners.first().and_then(port_of).unwrap_or(0);
            Address::Tcp { host, port }
        }
        other => other,
    }
}

/// The port that a socket listens at.
fn port_of(socket: impl AsFd) -> Option<u16> {
    address_of(socket).map(|address| address.port())
}

/// The address of TCP that a socket listens at.
fn address_of(socket: impl AsFd) -> Option<SocketAddr> {
    SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok()
}

/// The cause where a host cannot be looked up.
fn no_host(address: &Address, error: &io::Error) -> Cause {
    let text = error.to_string();
    // The words of getaddrinfo(3) stand behind those of the standard library.
    let why = text.rsplit(": ").next().unwrap_or_default().to_owned();
    Cause::NoHost { place: address.to_string(), why }
}

/// Listens on all addresses of a host that there are here, at one port.
///
/// * `address`: of TCP; others give nothing.
/// * `way_out`: what to do about connections that are not encrypted; `None`: all are.
///
/// Errors: none of them can be had.
pub fn listen_on(address: &Address, way_out: Option<&str>) -> Result<Vec<OwnedFd>, Failure> {
    let Address::Tcp { host, port } = address else { return Ok(Vec::new()) };
    let cannot = |error: &io::Error| {
        let exit = match error.kind() {
            io::ErrorKind::AddrInUse => Exit::Locked,
            io::ErrorKind::PermissionDenied => Exit::Permission,
            _ => Exit::Mountpoint,
        };
        Failure::system(format!("cannot listen at {address}"), error, exit)
    };
    let found = (host.as_str(), *port).to_socket_addrs().map_err(|error| {
        // What the resolver says has no number of the system.
        match error.raw_os_error() {
            None => cannot(&error).because(no_host(address, &error)),
            Some(_) => cannot(&error).because(Cause::NotListening),
        }
    })?;
    let listeners = bind_all(found, TcpListener::bind)
        .map_err(|error| cannot(&error).because(Cause::NotListening))?;
    for found in listeners.iter().filter_map(|listener| listener.local_addr().ok()) {
        if let Some(way_out) = way_out.filter(|_| !found.ip().is_loopback()) {
            terminal::warn(format_args!(
                "{found} is no loopback address: anybody who reaches it can use the disk, \
                 without encryption and without a password; {way_out}"
            ));
        }
    }
    Ok(listeners.into_iter().map(OwnedFd::from).collect())
}

/// Listens at those of the addresses that there are here. Where any free port was asked for it is
/// one that is free at all of them.
///
/// * `bind`: [`TcpListener::bind`].
fn bind_all(
    found: impl Iterator<Item = SocketAddr>,
    mut bind: impl FnMut(SocketAddr) -> io::Result<TcpListener>,
) -> io::Result<Vec<TcpListener>> {
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for address in found {
        // `/etc/hosts` may name one twice.
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    let is_any_free = addresses.iter().any(|address| address.port() == 0);
    let mut again = 0;
    loop {
        match bind_once(&addresses, &mut bind) {
            Err(error)
                if is_any_free
                    && error.kind() == io::ErrorKind::AddrInUse
                    && again < PORTS_AGAIN =>
            {
                again += 1;
            }
            ended => return ended,
        }
    }
}

/// The same, at the first port that is free at one of them.
///
/// Errors: none can be had, or that port is in use at another one.
fn bind_once(
    addresses: &[SocketAddr],
    bind: &mut impl FnMut(SocketAddr) -> io::Result<TcpListener>,
) -> io::Result<Vec<TcpListener>> {
    let (mut listeners, mut why) = (Vec::new(), None);
    for mut address in addresses.iter().copied() {
        let chosen = listeners.first().and_then(port_of).filter(|_| address.port() == 0);
        address.set_port(chosen.unwrap_or(address.port()));
        match bind(address) {
            Ok(listener) => listeners.push(listener),
            Err(error) if chosen.is_some() && error.kind() == io::ErrorKind::AddrInUse => {
                return Err(error);
            }
            // A host may have an address of a family that is not there.
            Err(error) => why = Some(error),
        }
    }
    match why {
        Some(error) if listeners.is_empty() => Err(error),
        _ => Ok(listeners),
    }
}

impl Listening {
    /// What `ringdisk ctl` finds the disks by: the first Unix socket, or else the first address of
    /// TCP.
    pub(super) fn target(&self) -> Option<PathBuf> {
        self.path.clone().or_else(|| self.address.clone())
    }

    /// Takes the names of sockets over that another process has made and has let go of.
    pub(super) fn adopt(&mut self, request: &Request) {
        for address in &request.addresses {
            if let Address::Unix(path) = address {
                self.made.extend(MadeSocket::adopt(path));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host with three addresses, of which `/etc/hosts` names one twice. At the second one the
    /// first `in_use` ports that are chosen are in use. Gives the attempts, and what came of them.
    fn bound(in_use: usize) -> (usize, io::Result<Vec<SocketAddr>>) {
        let hosts = [[127, 0, 0, 1], [127, 0, 0, 2], [127, 0, 0, 2]];
        let mut attempts = 0;
        let bind = |address: SocketAddr| {
            if address.ip().to_string() == "127.0.0.2" {
                attempts += 1;
                assert_ne!(address.port(), 0);
                if attempts <= in_use {
                    return Err(io::ErrorKind::AddrInUse.into());
                }
            }
            TcpListener::bind(address)
        };
        let listeners = bind_all(hosts.into_iter().map(|host| (host, 0).into()), bind);
        let addresses = |listeners: Vec<TcpListener>| {
            listeners.iter().map(|listener| listener.local_addr().unwrap()).collect()
        };
        (attempts, listeners.map(addresses))
    }

    #[test]
    fn a_port_that_is_in_use_at_another_address_of_the_host_is_given_up() {
        let (attempts, addresses) = bound(3);
        let addresses = addresses.unwrap();
        assert_eq!((attempts, addresses.len()), (4, 2));
        assert_eq!(addresses[0].port(), addresses[1].port());
    }

    #[test]
    fn two_addresses_with_one_port_get_their_own_sockets_of_another_process() {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        let second = TcpListener::bind(("127.0.0.2", port)).unwrap();
        let at = |host: &str| Address::Tcp { host: String::from(host), port };
        let addresses = [at("127.0.0.1"), at("127.0.0.2")];
        let sockets = || [&first, &second].map(|it| OwnedFd::from(it.try_clone().unwrap()));
        let taken_here = taken(&addresses, sockets().into()).unwrap();
        assert_eq!((taken_here.listeners.len(), taken_here.display_names.len()), (2, 2));
        assert!(taken(&addresses[..1], sockets().into()).is_err());
        let [socket, _] = sockets();
        let connection = std::net::TcpStream::connect(first.local_addr().unwrap()).unwrap();
        assert!(taken(&addresses, vec![socket, connection.into()]).is_err());
    }

    #[test]
    fn ports_are_tried_so_many_times() {
        let (attempts, addresses) = bound(usize::MAX);
        assert_eq!(attempts, 1 + PORTS_AGAIN);
        assert_eq!(addresses.unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
