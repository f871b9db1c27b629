//! The sockets of `--metrics`.
//!
//! Promises: they are there before the process is confined; an address that others can reach is
//! warned of.

use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringdisk_daemon::control::disk::DiskControl;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper::Named;
use ringdisk_daemon::metrics::{Health, MetricsServer, Source};
use ringdisk_daemon::sockets::{self, Address, MadeSocket, Opened, SocketOptions};
use ringdisk_daemon::terminal;
use ringdisk_vhost::Listen;

/// Sockets that clients of metrics connect to.
#[derive(Debug, Default)]
pub struct MetricsSockets {
    listeners: Vec<OwnedFd>,
    made: Vec<MadeSocket>,
}

impl MetricsSockets {
    /// Makes them.
    ///
    /// Errors: an address is in use, or cannot be listened on.
    pub fn make(addresses: &[Address]) -> Result<MetricsSockets, Failure> {
        let mut sockets = MetricsSockets::default();
        for address in addresses {
            match address {
                Address::Unix(path) => {
                    let options =
                        SocketOptions { make: Some(path.clone()), ..SocketOptions::default() };
                    let place = sockets::places(&[options], vec![None])?.pop();
                    let place = place
                        .ok_or_else(|| Failure::new(Exit::General, "no place for a socket"))?;
                    let Opened { listen, made, .. } = place.open()?;
                    if let Listen::Listener(listener) = listen {
                        sockets.listeners.push(listener);
                    }
                    sockets.made.extend(made);
                }
                Address::Tcp { host, port } => sockets.listen_on(host, *port)?,
                Address::Given(_) => {
                    return Err(Failure::new(Exit::Usage, "metrics: fd:N is for `serve --nbd`"));
                }
            }
        }
        for listener in &sockets.listeners {
            rustix::io::ioctl_fionbio(listener, true).map_err(|errno| {
                Failure::system("a socket for metrics", &errno.into(), Exit::General)
            })?;
        }
        Ok(sockets)
    }

    /// The same; where others rely on the disk already, a failure is complained of, and it is
    /// served without metrics.
    ///
    /// * `is_taken`: the disk was another process's.
    ///
    /// Errors: as [`MetricsSockets::make`]; none if `is_taken`.
    pub fn make_for(addresses: &[Address], is_taken: bool) -> Result<MetricsSockets, Failure> {
        MetricsSockets::make(addresses).or_else(|failure| {
            if !is_taken {
                return Err(failure);
            }
            terminal::complain(&failure.context("the disk is served without metrics"));
            Ok(MetricsSockets::default())
        })
    }

    fn listen_on(&mut self, host: &str, port: u16) -> Result<(), Failure> {
        let cannot = |error: &std::io::Error| {
            let exit = match error.kind() {
                std::io::ErrorKind::AddrInUse => Exit::Locked,
                _ => Exit::Mountpoint,
            };
            Failure::system(format!("cannot serve metrics at {host}:{port}"), error, exit)
        };
        let found = (host, port).to_socket_addrs().map_err(|error| cannot(&error))?;
        let mut why = None;
        for address in found {
            match TcpListener::bind(address) {
                Ok(listener) => {
                    if !address.ip().is_loopback() {
                        terminal::warn(format_args!(
                            "{address} is no loopback address: anybody who reaches it can read the \
                             metrics, with the names of images"
                        ));
                    }
                    self.listeners.push(listener.into());
                    why = None;
                    break;
                }
                // A host may have an address of a family that is not there.
                Err(error) => why = Some(error),
            }
        }
        why.map_or(Ok(()), |error| Err(cannot(&error)))
    }

    /// Names that go at the end.
    pub fn named(&self) -> Vec<Named> {
        self.made.iter().map(MadeSocket::named).collect()
    }

    /// Answers from now on.
    ///
    /// Errors: no thread.
    pub fn start(
        &mut self,
        disks: Vec<Arc<DiskControl>>,
    ) -> Result<Option<MetricsServer>, Failure> {
        if self.listeners.is_empty() {
            return Ok(None);
        }
        let disks = Arc::new(disks);
        let of_all = Arc::clone(&disks);
        let source: Source =
            Arc::new(move || of_all.iter().flat_map(|disk| disk.samples()).collect());
        let health: Health = Arc::new(move || disks.iter().find_map(|disk| disk.not_ready()));
        let listeners = std::mem::take(&mut self.listeners);
        MetricsServer::start(listeners, source, health)
            .map(Some)
            .map_err(|error| Failure::system("no thread for metrics", &error, Exit::General))
    }
}
