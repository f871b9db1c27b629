//! Asks many servers the same question at once.
//!
//! Promises: all answers together take no longer than the limit, however many servers say nothing;
//! an answer is at most [`REPLY_BYTES_MAX`] long. Nothing that is served is touched.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use serde_json::Value;

use super::protocol::{Command, REPLY_BYTES_MAX, Reply};
use super::registry::connect_now;

/// What came of the question to one server.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// It answered.
    Value(Value),
    /// It refused, in these words: a server of an older version does not know the question.
    Refused(String),
    /// It lives, and said nothing in time.
    Silent,
    /// Nobody listens there.
    Dead,
    /// It cannot be reached, for another reason.
    Unreachable(String),
}

/// A server that was asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// Its process.
    pub pid: Option<u32>,
    /// The user that it serves as, or was started by.
    pub user: Option<u32>,
    /// What came of it.
    pub answer: Answer,
}

/// A question that is under way.
struct Waiting {
    stream: UnixStream,
    bytes: Vec<u8>,
    /// So many of them have no end of a line.
    searched: usize,
    index: usize,
}

/// Asks; the answers are in the order of the sockets.
pub fn ask<P: AsRef<Path>>(sockets: &[P], command: &Command, limit: Duration) -> Vec<Asked> {
    let end = Instant::now() + limit;
    let line = format!("{}\n", command.line());
    let mut waiting = Vec::new();
    let mut asked: Vec<Asked> = Vec::with_capacity(sockets.len());
    for (index, socket) in sockets.iter().enumerate() {
        let begun = begin(socket.as_ref(), &line);
        let mut one = Asked { pid: None, user: None, answer: Answer::Silent };
        match begun {
            Ok(stream) => {
                if let Ok(peer) = socket_peercred(stream.as_fd()) {
                    one.pid = u32::try_from(peer.pid.as_raw_nonzero().get()).ok();
                    one.user = Some(peer.uid.as_raw());
                }
                waiting.push(Waiting { stream, bytes: Vec::new(), searched: 0, index });
            }
            Err(error) => one.answer = unreachable(&error),
        }
        asked.push(one);
    }
    while !waiting.is_empty() && wait(&waiting, end) {
        waiting.retain_mut(|one| match one.look() {
            Some(answer) => {
                asked[one.index].answer = answer;
                false
            }
            None => true,
        });
    }
    asked
}

/// Connects and asks; the answer is not waited for.
fn begin(socket: &Path, line: &str) -> io::Result<UnixStream> {
    let mut stream = connect_now(socket)?;
    stream.set_nonblocking(true)?;
    // A line fits into the empty buffer of a socket.
    stream.write_all(line.as_bytes())?;
    Ok(stream)
}

fn unreachable(error: &io::Error) -> Answer {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Answer::Dead,
        // Too many want to talk to it.
        io::ErrorKind::WouldBlock => Answer::Silent,
        _ => Answer::Unreachable(crate::failure::words(error)),
    }
}

/// Waits until one of them says something. `false`: the time is up.
fn wait(waiting: &[Waiting], end: Instant) -> bool {
    let left = end.saturating_duration_since(Instant::now());
    let Ok(left) = Timespec::try_from(left) else { return false };
    let mut fds: Vec<PollFd<'_>> =
        waiting.iter().map(|one| PollFd::new(&one.stream, PollFlags::IN)).collect();
    match poll(&mut fds, Some(&left)) {
        Ok(0) => false,
        Ok(_) => true,
        Err(errno) => errno == rustix::io::Errno::INTR,
    }
}

impl Waiting {
    /// Takes what is there. `None`: there is no answer yet.
    fn look(&mut self) -> Option<Answer> {
        let mut piece = [0; 8192];
        loop {
            match self.stream.read(&mut piece) {
                Ok(0) => return Some(Answer::Dead),
                Ok(count) => self.bytes.extend_from_slice(piece.get(..count).unwrap_or_default()),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return None,
                    io::ErrorKind::Interrupted => continue,
                    _ => return Some(Answer::Dead),
                },
            }
            // Each byte is looked at once: an answer may be long, and a server may send any bytes.
            while let Some(end) = self.bytes[self.searched..].iter().position(|b| *b == b'\n') {
                let rest = self.bytes.split_off(self.searched + end + 1);
                self.searched = 0;
                let line = std::mem::replace(&mut self.bytes, rest);
                match Reply::read(&line) {
                    Some(Reply::Done(value)) => return Some(Answer::Value(value)),
                    Some(Reply::Refused { text, .. }) => return Some(Answer::Refused(text)),
                    Some(_) => {}
                    None => return Some(Answer::Refused(String::from("it makes no sense"))),
                }
            }
            self.searched = self.bytes.len();
            if self.bytes.len() > REPLY_BYTES_MAX {
                return Some(Answer::Refused(String::from("its answer has no end")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use serde_json::json;

    use super::*;

    #[test]
    fn servers_that_answer_are_not_held_up_by_those_that_do_not() {
        let directory = tempfile::tempdir().expect("directory");
        let path = |name: &str| directory.path().join(name);
        let _silent = UnixListener::bind(path("silent")).expect("bind");
        drop(UnixListener::bind(path("dead")).expect("bind"));
        let good = UnixListener::bind(path("good")).expect("bind");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = good.accept().expect("a client");
            let lines =
                "{\"ringdisk\":{\"version\":\"0\",\"protocol\":1}}\n{\"return\":{\"a\":1}}\n";
            stream.write_all(lines.as_bytes()).expect("write");
            stream
        });
        let rude = UnixListener::bind(path("rude")).expect("bind");
        let endless = std::thread::spawn(move || {
            let (mut stream, _) = rude.accept().expect("a client");
            while stream.write_all(&[b'x'; 65536]).is_ok() {}
        });
        let sockets = [path("silent"), path("dead"), path("good"), path("rude"), path("none")];
        // The silent one takes all of it; on a busy machine the others need some.
        let limit = Duration::from_secs(5);
        let asked = ask(&sockets, &Command::Describe, limit);
        assert_eq!(asked[0].answer, Answer::Silent);
        assert_eq!(asked[0].pid, Some(std::process::id()));
        assert_eq!(asked[1].answer, Answer::Dead);
        assert_eq!(asked[2].answer, Answer::Value(json!({ "a": 1 })));
        assert!(matches!(asked[3].answer, Answer::Refused(_)), "{:?}", asked[3]);
        assert!(matches!(asked[4].answer, Answer::Unreachable(_)));
        drop(server.join());
        drop(endless.join());
    }
}
