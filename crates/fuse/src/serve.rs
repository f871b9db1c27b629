//! What every transport does with a request: carry it out on the disk, count it, and say what the
//! answer is.
//!
//! Promises: the data of a READ are left in the buffer that the transport gave, those of a WRITE
//! are taken from it; everything else is a small reply by value. Queue threads; no allocation, no
//! lock, no panic.

use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::file::FileServer;
use crate::reply::ReplyBuf;
use crate::request::{Operation, Request};
use ringdisk_export::stats::QueueCells;

/// The answer to a request.
pub(crate) enum Answer {
    /// The kernel waits for none.
    None,
    /// A READ: this many bytes of the buffer.
    Data(usize),
    /// Anything else, errors too.
    Reply(ReplyBuf),
}

impl Answer {
    /// A failure.
    pub(crate) fn error(unique: u64, errno: Errno) -> Answer {
        let mut reply = ReplyBuf::new();
        reply.set_error(unique, errno);
        Answer::Reply(reply)
    }
}

/// Carries a request out.
///
/// * `data`: where the data of a WRITE are and those of a READ go.
pub(crate) async fn answer(
    ring: &Ring,
    server: &FileServer,
    cells: &QueueCells,
    request: &Request,
    data: &IoBuf,
) -> Answer {
    let unique = request.header.unique;
    match &request.operation {
        Operation::Read(argument) => {
            cells.reads.add(1);
            match server.read(ring, argument.offset, argument.size, data).await {
                Ok(len) => {
                    cells.read_bytes.add(len as u64);
                    Answer::Data(len)
                }
                Err(errno) => {
                    server.failed("a read", argument.offset, argument.size.into(), errno);
                    Answer::error(unique, errno)
                }
            }
        }
        Operation::Write(argument) => {
            cells.writes.add(1);
            let size = argument.size as usize;
            if size > data.len() {
                return Answer::error(unique, Errno::INVAL);
            }
            match server.write(ring, argument, &data.slice(0..size)).await {
                Ok(len) => {
                    cells.write_bytes.add(len as u64);
                    let mut reply = ReplyBuf::new();
                    reply.set_written(unique, len);
                    Answer::Reply(reply)
                }
                Err(errno) => {
                    server.failed_write(argument, errno);
                    Answer::error(unique, errno)
                }
            }
        }
        _ => {
            let mut reply = ReplyBuf::new();
            server.serve_control(ring, request, &mut reply).await;
            if reply.is_empty() { Answer::None } else { Answer::Reply(reply) }
        }
    }
}
