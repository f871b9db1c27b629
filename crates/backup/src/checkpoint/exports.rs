//! Where readers find the disks of a checkpoint: names of exports, addresses, sockets.
//!
//! Promises: no two disks of a checkpoint have the same name; disks of one process share an
//! address, other processes have one each; sockets have the mode 0600, and those that nobody serves
//! are removed.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use ringdisk_daemon::control::registry;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::sockets::{Address, MadeSocket};
use ringdisk_storage::{NbdAddress, NbdServer};
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_nodelay};

use super::{Listen, Target};

/// Addresses of the processes that serve the disks.
#[derive(Debug)]
pub(super) struct Places {
    /// For each target: which address it has, and whether it is the first one there.
    of: Vec<(usize, bool)>,
    addresses: Vec<Address>,
}

/// Sockets that were made; their names go when this is dropped.
#[derive(Debug, Default)]
pub(super) struct Sockets(Vec<MadeSocket>);

impl Sockets {
    /// The names stay: the servers have the sockets.
    pub(super) fn leave(self) {
        self.0.into_iter().for_each(MadeSocket::leave);
    }
}

/// What one server gets.
#[derive(Debug, Default)]
pub(super) struct Listening {
    pub(super) listeners: Vec<OwnedFd>,
    /// Of a Unix socket; absolute.
    pub(super) path: Option<String>,
}

/// Names of the exports: the last parts of the targets; of those that are equal, later ones get a
/// number.
pub fn names(paths: &[&Path]) -> Vec<String> {
    let mut names: Vec<String> = Vec::with_capacity(paths.len());
    for path in paths {
        let last = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let mut name = last.clone();
        let mut number = 2;
        while names.contains(&name) {
            name = format!("{last}-{number}");
            number += 1;
        }
        names.push(name);
    }
    names
}

impl Places {
    /// * `address`: of the first process.
    ///
    /// Errors: there are no further ports; a directory for sockets cannot be had.
    pub(super) fn new(
        targets: &[Target],
        address: Option<&Address>,
        name: &str,
        id: &str,
    ) -> Result<Places, Failure> {
        let mut processes: Vec<Option<i32>> = Vec::new();
        let of = targets.iter().map(|target| {
            let process = target.client.server();
            let known = processes.iter().position(|other| other.is_some() && *other == process);
            let number = known.unwrap_or(processes.len());
            if known.is_none() {
                processes.push(process);
            }
            (number, known.is_none())
        });
        let of: Vec<(usize, bool)> = of.collect();
        let first = match address {
            Some(Address::Unix(path)) => {
                let path = std::path::absolute(path).map_err(|error| {
                    Failure::system("the name of the socket", &error, Exit::Usage)
                })?;
                Address::Unix(path)
            }
            Some(address) => address.clone(),
            None => {
                let short = id.get(..8).unwrap_or(id);
                Address::Unix(registry::reader_socket(name, short).map_err(|error| {
                    Failure::system("no place for a socket", &error, Exit::Mountpoint)
                        .hint("--nbd names one")
                })?)
            }
        };
        let addresses = (0..processes.len()).map(|number| further(&first, number));
        Ok(Places { of, addresses: addresses.collect::<Result<_, _>>()? })
    }

    /// Makes the sockets of the process of a target, unless an earlier target has them.
    ///
    /// Errors: an address is in use, or cannot be listened on.
    pub(super) fn listen(
        &self,
        target: usize,
        sockets: &mut Sockets,
        listen: Listen,
    ) -> Result<Listening, Failure> {
        let (place, is_first) = self.of[target];
        if !is_first {
            return Ok(Listening::default());
        }
        let listening = match &self.addresses[place] {
            Address::Unix(path) => {
                let (listener, made) = MadeSocket::make(path, 0o600, None)?;
                sockets.0.push(made);
                let path = path.to_str().map(str::to_owned);
                Listening { listeners: vec![listener], path }
            }
            address @ (Address::Tcp { .. } | Address::Given(_)) => {
                Listening { listeners: listen(address)?, path: None }
            }
        };
        for listener in &listening.listeners {
            // The server may set neither inside its sandbox. Unix sockets know only the first.
            rustix::io::ioctl_fionbio(listener, true).map_err(|errno| {
                Failure::system("a listening socket", &errno.into(), Exit::General)
            })?;
            let _ = set_tcp_nodelay(listener, true);
            let _ = set_socket_keepalive(listener, true);
        }
        Ok(listening)
    }

    /// Where readers find the disk of a target.
    ///
    /// Errors: the name is too long for an export.
    pub(super) fn uri(&self, target: usize, export: &str) -> Result<String, Failure> {
        let server = match &self.addresses[self.of[target].0] {
            Address::Unix(path) => NbdServer::Unix(path.clone()),
            Address::Tcp { host, port } => NbdServer::Tcp(host.clone(), *port),
            Address::Given(_) => return Err(not_its_own()),
        };
        let address = NbdAddress::new(server, export.as_bytes().to_vec());
        let address = address.map_err(|why| Failure::new(Exit::Usage, why.to_string()))?;
        Ok(address.to_string())
    }
}

/// The address of a further process.
fn further(first: &Address, number: usize) -> Result<Address, Failure> {
    match first {
        first if number == 0 => Ok(first.clone()),
        Address::Unix(path) => {
            let mut path = path.clone().into_os_string();
            path.push(format!(".{}", number + 1));
            Ok(Address::Unix(path.into()))
        }
        Address::Tcp { host, port } => {
            let next = u16::try_from(number).ok().and_then(|number| port.checked_add(number));
            let port = next.ok_or_else(|| {
                Failure::new(Exit::Usage, "each process takes a port, and there are no more")
            })?;
            Ok(Address::Tcp { host: host.clone(), port })
        }
        Address::Given(_) => Err(not_its_own()),
    }
}

fn not_its_own() -> Failure {
    Failure::new(Exit::Usage, "each process listens at an address of its own")
}

/// Removes a socket that a checkpoint has left: one that nobody listens on any more.
///
/// * `path`: as the server says, so nothing else goes.
pub(super) fn remove_left(path: &Path) {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    if is_socket && registry::is_left(path) {
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_names_get_numbers() {
        let paths = ["/srv/a", "/mnt/a", "/srv/b", "a"].map(Path::new);
        assert_eq!(names(&paths), ["a", "a-2", "b", "a-3"]);
    }

    #[test]
    fn further_processes_have_addresses_of_their_own() {
        let unix = Address::Unix("/run/r".into());
        assert_eq!(further(&unix, 0).expect("the first"), unix);
        assert_eq!(further(&unix, 2).expect("the third"), Address::Unix("/run/r.3".into()));
        let tcp = |port| Address::Tcp { host: String::from("::1"), port };
        assert_eq!(further(&tcp(10), 1).expect("the second"), tcp(11));
        assert!(further(&tcp(65_535), 1).is_err());
    }

    #[test]
    fn names_in_uris_are_escaped() {
        let place = |address| Places { of: vec![(0, true)], addresses: vec![address] };
        let unix = place(Address::Unix("/run/a b&c".into()));
        assert_eq!(unix.uri(0, "x/y?").expect("a URI"), "nbd+unix:///x/y%3F?socket=/run/a%20b%26c");
        let tcp = place(Address::Tcp { host: String::from("::1"), port: 9 });
        assert_eq!(tcp.uri(0, "a").expect("a URI"), "nbd://[::1]:9/a");
    }
}
