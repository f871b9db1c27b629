//! Answers HTTP requests for metrics and health: `--metrics ADDRESS`.
//!
//! Promises: `GET` of `/metrics`, `/healthz` and `/readyz`, and nothing else; a client gets one
//! answer, and [`CLIENT_LIMIT`] for its request and for reading that. At most [`CLIENTS_MAX`] at
//! once; further ones wait in the socket. Half requests, endless ones and slow readers cost one
//! place each until then, and never a queue thread. One thread, which sleeps while nobody asks.
//!
//! `/healthz` says that the process answers; `/readyz` that all of its disks are served without a
//! fault (503 otherwise, with the reason).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, accept_with, recv, send};

use super::{Sample, render};

/// Clients at once; each costs a descriptor and its request.
const CLIENTS_MAX: usize = 128;
/// Longest request with its headers, bytes.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// How long a client may take for its request and for reading the answer (5 s).
const CLIENT_LIMIT: Duration = Duration::from_secs(5);
/// Pause after a failed accept (no descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// The samples now.
pub type Source = Arc<dyn Fn() -> Vec<Sample> + Send + Sync>;
/// Why not all disks are ready; `None`: they are.
pub type Health = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// A running server; dropping it ends it.
#[derive(Debug)]
pub struct MetricsServer {
    thread: Option<JoinHandle<()>>,
    /// Closed at the end, which the thread sees.
    end: Option<UnixStream>,
}

/// What the thread has.
struct Work {
    listeners: Vec<OwnedFd>,
    end: UnixStream,
    source: Source,
    health: Health,
    clients: Vec<Client>,
}

/// One client.
struct Client {
    socket: OwnedFd,
    request: Vec<u8>,
    /// What is to be sent yet; `None`: the request is not whole.
    answer: Option<Vec<u8>>,
    sent: usize,
    since: Instant,
}

impl MetricsServer {
    /// Answers from now on.
    ///
    /// * `listeners`: listening sockets, which do not block.
    ///
    /// Errors: no thread, no descriptors.
    pub fn start(
        listeners: Vec<OwnedFd>,
        source: Source,
        health: Health,
    ) -> io::Result<MetricsServer> {
        let (end, theirs) = UnixStream::pair()?;
        let mut work = Work { listeners, end: theirs, source, health, clients: Vec::new() };
        let thread = std::thread::Builder::new().name(String::from("metrics"));
        let thread = thread.spawn(move || work.run())?;
        Ok(MetricsServer { thread: Some(thread), end: Some(end) })
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Work {
    fn run(&mut self) {
        let mut pause = None;
        while self.wait(pause.take()) {
            let now = Instant::now();
            for listener in &self.listeners {
                while self.clients.len() < CLIENTS_MAX {
                    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                    match accept_with(listener, flags) {
                        Ok(socket) => self.clients.push(Client {
                            socket,
                            request: Vec::new(),
                            answer: None,
                            sent: 0,
                            since: now,
                        }),
                        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => break,
                        Err(errno) => {
                            tracing::debug!("metrics: {errno}");
                            pause = Some(ACCEPT_PAUSE);
                            break;
                        }
                    }
                }
            }
            let (source, health) = (&self.source, &self.health);
            self.clients.retain_mut(|client| {
                now.duration_since(client.since) < CLIENT_LIMIT
                    && client.go_on(&|path| answer(path, source, health))
            });
        }
    }

    /// Waits until there is something to do. `false`: the end has come.
    ///
    /// * `pause`: so long no client is accepted.
    fn wait(&self, pause: Option<Duration>) -> bool {
        let accepts = pause.is_none() && self.clients.len() < CLIENTS_MAX;
        let mut fds = vec![PollFd::new(&self.end, PollFlags::IN)];
        for client in &self.clients {
            let what = if client.answer.is_some() { PollFlags::OUT } else { PollFlags::IN };
            fds.push(PollFd::new(&client.socket, what));
        }
        if accepts {
            fds.extend(self.listeners.iter().map(|it| PollFd::new(it, PollFlags::IN)));
        }
        // The oldest client is the first one.
        let late =
            self.clients.first().map(|client| CLIENT_LIMIT.saturating_sub(client.since.elapsed()));
        let limit = pause.into_iter().chain(late).min();
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let _ = poll(&mut fds, limit.as_ref());
        fds[0].revents().is_empty()
    }
}

impl Client {
    /// Reads, or writes, what can be now. `false`: it is done with, or has gone.
    ///
    /// * `answer`: to a request for this path.
    fn go_on(&mut self, answer: &dyn Fn(&str) -> String) -> bool {
        if self.answer.is_none() {
            match self.read() {
                Ok(()) => {}
                Err(()) => return false,
            }
            match path_of(&self.request) {
                Request::Whole(path) => self.answer = Some(answer(&path).into_bytes()),
                Request::Bad(status) => self.answer = Some(response(status, "").into_bytes()),
                Request::Part => return true,
            }
        }
        self.write()
    }

    /// Errors: the client has gone.
    fn read(&mut self) -> Result<(), ()> {
        let mut piece = [0; 2048];
        while self.request.len() <= REQUEST_BYTES_MAX {
            match recv(self.socket.as_fd(), &mut piece[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(()),
                Ok((count, _)) => self.request.extend_from_slice(&piece[..count]),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(_) => return Err(()),
            }
        }
        Ok(())
    }

    fn write(&mut self) -> bool {
        let rest = self.answer.as_deref().unwrap_or_default();
        while self.sent < rest.len() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(self.socket.as_fd(), &rest[self.sent..], flags) {
                Ok(count) => self.sent += count,
                Err(Errno::AGAIN) => return true,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        false
    }
}

/// What has come of a request.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    /// A `GET` of this path.
    Whole(String),
    /// It is not whole yet.
    Part,
    /// It makes no sense; the status that says so.
    Bad(&'static str),
}

fn path_of(request: &[u8]) -> Request {
    let is_whole = request.windows(4).any(|end| end == b"\r\n\r\n")
        || request.windows(2).any(|end| end == b"\n\n");
    if !is_whole {
        return match request.len() > REQUEST_BYTES_MAX {
            true => Request::Bad("431 Request Header Fields Too Large"),
            false => Request::Part,
        };
    }
    let line = request.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_whitespace();
    match (words.next(), words.next(), words.next()) {
        (Some("GET"), Some(path), Some(version)) if version.starts_with("HTTP/1.") => {
            Request::Whole(path.split('?').next().unwrap_or_default().to_owned())
        }
        (Some(_), Some(_), Some(version)) if version.starts_with("HTTP/1.") => {
            Request::Bad("405 Method Not Allowed")
        }
        _ => Request::Bad("400 Bad Request"),
    }
}

fn answer(path: &str, source: &Source, health: &Health) -> String {
    match path {
        "/metrics" => response("200 OK", &render(&source())),
        "/healthz" => response("200 OK", "ok\n"),
        "/readyz" => match health() {
            None => response("200 OK", "ready\n"),
            Some(why) => response("503 Service Unavailable", &format!("{why}\n")),
        },
        _ => response("404 Not Found", "/metrics, /healthz and /readyz are here\n"),
    }
}

/// An answer, after which the connection is closed.
fn response(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}
