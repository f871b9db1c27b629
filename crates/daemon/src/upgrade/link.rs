//! A [`HandOverState`] over a stream socket: two numbers of 32 bits, little-endian (bytes of the
//! description, count of the descriptors); the descriptors, some to a message; the description.
//!
//! Promises: a length or a count beyond its limit is refused before memory is taken for it; a state
//! is received within the caller's time, however slowly the other process sends. In place of a
//! state the same form carries a refusal: the count says of which kind, the description is its
//! reason. The threads of an upgrade only; allocates and blocks.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringdisk_export::{Error, ErrorKind, HandOverState};
use ringdisk_messages::{DESCRIPTORS_MAX, Wait};

use super::ClientView;

/// Longest description, bytes: 500 regions of memory and a chain of 200 images need a tenth.
const WORDS_MAX: u32 = 4 << 20;
/// Descriptors at most.
const FDS_MAX: u32 = 4096;
/// Longest words of a command line, bytes: two paths and some options.
const VIEW_BYTES_MAX: u32 = 64 << 10;
/// In place of a number of descriptors: there is no state, the words say why.
const REFUSED: u32 = u32::MAX;
/// The same, and the reason is in the words of the process that asked.
const UNLIKE: u32 = u32::MAX - 1;
/// The same, and a later attempt would end as this one: the words are the reason and, on the next
/// line, what the user can do.
const NEVER: u32 = u32::MAX - 2;

/// Why there is no state.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It cannot be had now.
    Now(String),
    /// The guest would see another device.
    Unlike(String),
    /// It cannot be handed over.
    Never {
        /// The reason.
        why: String,
        /// What the user can do.
        hint: String,
    },
}

impl Refusal {
    /// Why an export is not handed over.
    pub(crate) fn of(error: &Error) -> Refusal {
        match (error.kind(), error.hint_text()) {
            (ErrorKind::Unsupported, Some(hint)) => {
                Refusal::Never { why: error.to_string(), hint: hint.to_owned() }
            }
            _ => Refusal::Now(error.to_string()),
        }
    }
}

/// Says what clients would see.
///
/// Errors: those of the socket.
pub(crate) fn send_view(mut stream: &UnixStream, view: &ClientView) -> io::Result<()> {
    let words = serde_json::to_vec(view)?;
    let len = u32::try_from(words.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    stream.write_all(&len.to_le_bytes())?;
    stream.write_all(&words)
}

/// The first word; `None`: there is none.
///
/// Errors: those of the socket.
pub(crate) fn receive_word(mut stream: &UnixStream) -> io::Result<Option<u8>> {
    let mut word = [0];
    loop {
        match stream.read(&mut word) {
            // A socket with a time limit hears of everything that a thread is woken for, also of
            // SIGCONT.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            count => return Ok((count? > 0).then_some(word[0])),
        }
    }
}

/// What clients would see.
///
/// Errors: those of the socket; words that make no sense.
pub(crate) fn receive_view(mut stream: &UnixStream) -> io::Result<ClientView> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len);
    if len > VIEW_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut words = vec![0; len as usize];
    stream.read_exact(&mut words)?;
    Ok(serde_json::from_slice(&words)?)
}

/// Sends a state.
///
/// Errors: those of the socket.
pub(crate) fn send(mut stream: &UnixStream, state: &HandOverState) -> io::Result<()> {
    let count = |len: usize| u32::try_from(len).map_err(|_| io::ErrorKind::InvalidInput);
    let (words, fds) = (count(state.description.len())?, count(state.fds.len())?);
    stream.write_all(&[words.to_le_bytes(), fds.to_le_bytes()].concat())?;
    for lot in state.fds.chunks(DESCRIPTORS_MAX) {
        let lot: Vec<BorrowedFd<'_>> = lot.iter().map(AsFd::as_fd).collect();
        // Descriptors travel with at least one byte.
        ringdisk_messages::send(stream, &[IoSlice::new(&[0])], &lot, Wait::Forever)?;
    }
    stream.write_all(state.description.as_bytes())
}

/// Says why there is no state.
pub(crate) fn send_refusal(mut stream: &UnixStream, refusal: &Refusal) -> io::Result<()> {
    let (why, mark) = match refusal {
        Refusal::Now(why) => (why.clone(), REFUSED),
        Refusal::Unlike(why) => (why.clone(), UNLIKE),
        Refusal::Never { why, hint } => (format!("{}\n{hint}", why.replace('\n', " ")), NEVER),
    };
    let len = u32::try_from(why.len()).unwrap_or(0);
    stream.write_all(&[len.to_le_bytes(), mark.to_le_bytes()].concat())?;
    stream.write_all(why.as_bytes())
}

/// A stream of which all has to come by a time, however it is cut.
struct Until<'a> {
    stream: &'a UnixStream,
    end: Instant,
}

impl Until<'_> {
    /// The next look at the stream waits no longer than that.
    ///
    /// Errors: `TimedOut`.
    fn limit(&self) -> io::Result<()> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))
    }
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.limit()?;
        self.stream.read(bytes)
    }
}

/// Receives a state, or why there is none.
///
/// * `limit`: for all of it. The other process may send byte for byte, and a guest stands still
///   meanwhile.
///
/// Errors: those of the socket; numbers that make no sense; it takes too long.
pub fn receive(stream: &UnixStream, limit: Duration) -> io::Result<Result<HandOverState, Refusal>> {
    let mut stream = Until { stream, end: Instant::now() + limit };
    let mut numbers = [0; 8];
    stream.read_exact(&mut numbers)?;
    let [a, b, c, d, e, f, g, h] = numbers;
    let (words, count) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
    let is_refusal = matches!(count, REFUSED | UNLIKE | NEVER);
    if words > WORDS_MAX || count > FDS_MAX && !is_refusal {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut fds = Vec::new();
    while !is_refusal && fds.len() < count as usize {
        stream.limit()?;
        fds.extend(receive_lot(stream.stream, count as usize - fds.len())?);
    }
    let mut text = vec![0; words as usize];
    stream.read_exact(&mut text)?;
    let description = String::from_utf8_lossy(&text).into_owned();
    Ok(match count {
        REFUSED => Err(Refusal::Now(description)),
        UNLIKE => Err(Refusal::Unlike(description)),
        NEVER => {
            let (why, hint) = description.split_once('\n').unwrap_or((&description, ""));
            Err(Refusal::Never { why: why.to_owned(), hint: hint.to_owned() })
        }
        _ => Ok(HandOverState { description, fds }),
    })
}

/// The next descriptors, at most as many as `left`.
fn receive_lot(stream: &UnixStream, left: usize) -> io::Result<Vec<OwnedFd>> {
    let message = ringdisk_messages::receive(stream, &mut [0], Wait::Forever)?.whole()?;
    match message.descriptors.len() {
        0 if message.len == 0 => Err(io::ErrorKind::UnexpectedEof.into()),
        count if (1..=left).contains(&count) => Ok(message.descriptors),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests;
