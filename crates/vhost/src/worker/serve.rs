//! What a request does to the disk.
//!
//! Promises: queue threads. The bytes of a request are copied once and then used; its data go
//! between guest memory and the storage without a copy, unless the storage wants another alignment.

use ringdisk_disk::Bytes;
use ringdisk_guest::losses;
use ringdisk_ring::{Errno, IoBuf};

use super::{Slot, Vring, Worker};
use crate::blk::SERIAL_BYTES;
use crate::blk::request::{HEADER_BYTES, Header, Kind, RANGE_BYTES, Range, Status, range_count};
use crate::device::OnError;

/// Serves the request in `slot`. Returns how many bytes of guest memory were written, from the
/// first that may be: what the used element says.
pub(super) async fn serve(worker: &Worker, vring: &Vring, slot: &Slot) -> u32 {
    let losses_before = losses();
    let mut bytes = [0; HEADER_BYTES];
    let (readable, writable) = {
        let chain = slot.chain.borrow();
        (chain.readable_len(), chain.writable_len())
    };
    if readable < HEADER_BYTES as u64 || writable < 1 || !slot.read(0, &mut bytes) {
        let why = format!(
            "a request of {readable} bytes to read and {writable} to write has no header or no \
             status"
        );
        vring.set_broken(&worker.device, &why);
        return 0;
    }
    let header = Header::parse(&bytes);
    let (sent, wanted) = (readable - HEADER_BYTES as u64, writable - 1);
    let (status, len) = match header.kind {
        Kind::Read => (read(worker, slot, header, wanted).await, wanted),
        Kind::Write => (write(worker, slot, header, sent).await, 0),
        Kind::Flush => (flush(worker).await, 0),
        Kind::GetId => get_id(worker, slot, wanted),
        Kind::Discard | Kind::WriteZeroes => (ranges(worker, slot, header, sent).await, 0),
        Kind::Unknown => (Status::Unsupported, 0),
    };
    // Memory that goes leaves zeroes of our own, which are on the disk now, or what was read is
    // with nobody: that is no success.
    let is_lost = losses() != losses_before && slot.is_lost();
    let status = if is_lost { Status::IoError } else { status };
    if status != Status::Ok {
        worker.cells.errors.add(1);
    }
    if status == Status::IoError {
        worker.device.answered_io_error();
    }
    slot.write(wanted, &[status as u8]);
    let done = if status == Status::Ok { len } else { 0 };
    // What was written must be contiguous from the first byte: the status counts where nothing lies
    // before it or all of that was written.
    let written = if done == wanted { writable } else { done };
    vring.with_log(|log| slot.chain.borrow().mark_written(log, writable));
    u32::try_from(written).unwrap_or(u32::MAX)
}

/// Where data of `len` bytes lie.
fn place(worker: &Worker, header: Header, len: u64) -> Option<u64> {
    header.place(len, worker.device.logical_block, worker.disk.size().0)
}

/// What a driver asks for that the device cannot do; it knew that it cannot.
fn refuse(worker: &Worker, header: Header, why: &str) -> Status {
    worker.device.refused(header.kind.name(), header.sector, why);
    Status::IoError
}

const NOT_THERE: &str = "it is not on the disk, or not of whole logical blocks";
const READ_ONLY: &str = "the disk is read-only";
const NO_MEMORY: &str = "its memory is not there";

async fn read(worker: &Worker, slot: &Slot, header: Header, len: u64) -> Status {
    let Some(offset) = place(worker, header, len) else {
        return refuse(worker, header, NOT_THERE);
    };
    worker.cells.reads.add(1);
    worker.cells.read_bytes.add(len);
    if len == 0 {
        return Status::Ok;
    }
    let Some(buf) = slot.writable(len) else { return refuse(worker, header, NO_MEMORY) };
    attempt(worker, "a read", offset, len, || async {
        whole(worker.disk.read(&worker.ring, offset, &buf).await?, &buf)
    })
    .await
}

async fn write(worker: &Worker, slot: &Slot, header: Header, len: u64) -> Status {
    let Some(offset) = place(worker, header, len) else {
        return refuse(worker, header, NOT_THERE);
    };
    if worker.device.read_only {
        return refuse(worker, header, READ_ONLY);
    }
    worker.cells.writes.add(1);
    worker.cells.write_bytes.add(len);
    if len == 0 {
        return Status::Ok;
    }
    let Some(buf) = slot.readable(HEADER_BYTES as u64, len) else {
        return refuse(worker, header, NO_MEMORY);
    };
    attempt(worker, "a write", offset, len, || async {
        let mut done = 0;
        // A short write means that an error came: the rest shows which.
        while done < buf.len() {
            let rest = buf.slice(done..buf.len());
            match worker.disk.write(&worker.ring, offset + done as u64, &rest).await? {
                0 => return Err(Errno::NOSPC),
                n => done += n,
            }
        }
        write_through(worker).await
    })
    .await
}

async fn flush(worker: &Worker) -> Status {
    attempt(worker, "a flush", 0, 0, || worker.disk.flush(&worker.ring)).await
}

fn get_id(worker: &Worker, slot: &Slot, room: u64) -> (Status, u64) {
    let len = usize::try_from(room).unwrap_or(SERIAL_BYTES).min(SERIAL_BYTES);
    slot.write(0, &worker.device.serial[..len]);
    (Status::Ok, len as u64)
}

/// Discards or zeroes all ranges of a request, one after the other.
async fn ranges(worker: &Worker, slot: &Slot, header: Header, sent: u64) -> Status {
    let Some(count) = range_count(sent) else {
        return refuse(worker, header, "there are too many ranges, or not whole ones");
    };
    if worker.device.read_only {
        return refuse(worker, header, READ_ONLY);
    }
    let kind = header.kind;
    let (block, capacity) = (worker.device.logical_block, worker.disk.size());
    let at = |index: usize| (HEADER_BYTES + index * RANGE_BYTES) as u64;
    for index in 0..count {
        let mut bytes = [0; RANGE_BYTES];
        if !slot.read(at(index), &mut bytes) {
            return refuse(worker, header, NO_MEMORY);
        }
        let range = match Range::parse(&bytes, kind, block, capacity.0) {
            Ok(range) => range,
            Err(Status::IoError) => return refuse(worker, header, NOT_THERE),
            Err(status) => return status,
        };
        let Range { offset, len, may_unmap } = range;
        let status = match kind {
            Kind::Discard => {
                attempt(worker, "a discard", offset, len, || discard(worker, offset, len)).await
            }
            _ => {
                let zero = || worker.disk.write_zeroes(&worker.ring, offset, Bytes(len), may_unmap);
                attempt(worker, "zeroing", offset, len, zero).await
            }
        };
        if status != Status::Ok {
            return status;
        }
    }
    if worker.device.is_write_through() {
        return flush(worker).await;
    }
    Status::Ok
}

/// Gives space back; it is a hint, so where the storage cannot nothing happens.
async fn discard(worker: &Worker, offset: u64, len: u64) -> Result<(), Errno> {
    match worker.disk.discard(&worker.ring, offset, Bytes(len)).await {
        Err(Errno::OPNOTSUPP) => Ok(()),
        result => result,
    }
}

/// Makes what was written durable, if the driver cannot or does not want to ask for it.
async fn write_through(worker: &Worker) -> Result<(), Errno> {
    if !worker.device.is_write_through() {
        return Ok(());
    }
    worker.disk.flush(&worker.ring).await
}

/// The disk ends where the driver knows that it does, so a short read means that it has shrunk
/// meanwhile.
fn whole(done: usize, buf: &IoBuf) -> Result<(), Errno> {
    if done == buf.len() { Ok(()) } else { Err(Errno::IO) }
}

/// Does something on the disk. With [`OnError::Stop`] a request that fails is never answered:
/// everything ends, and it is done again by the process that serves the disk next.
async fn attempt<F, T>(
    worker: &Worker,
    what: &'static str,
    offset: u64,
    len: u64,
    work: F,
) -> Status
where
    F: FnOnce() -> T,
    T: Future<Output = Result<(), Errno>>,
{
    let Err(errno) = work().await else { return Status::Ok };
    worker.device.image_error(what, offset, len, errno);
    if worker.device.on_error == OnError::Stop {
        worker.device.give_up();
        std::future::pending::<()>().await;
    }
    Status::IoError
}
