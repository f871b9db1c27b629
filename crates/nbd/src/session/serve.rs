//! Carries out requests: the task of a slot.
//!
//! Promises: one request at a time, judged before; a read or write that stays in the caches of the
//! disk takes no lock and allocates nothing. A flush covers what was answered before on any
//! connection: nothing between the disk and a client keeps data back.

use std::rc::Rc;

use ringdisk_disk::{Bytes, Mapping};
use ringdisk_nbd_protocol::numbers::{command, command_flags as flags, errno};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_ring::Errno;
use ringdisk_throttle::Kind;

use super::answer::HOLE_ROOM_BYTES;
use super::slot::{RUNS_MAX, Run, Slot};
use super::validate::{Refusal, failed};
use super::{SMALL_BYTES, Session, status};

/// Reads of so many bytes are looked at for holes: below that, sending zeroes costs less than the
/// look-up.
const HOLES_FROM_BYTES: usize = 32 << 10;
/// Longest part of a discard or of zeroes that is carried out at once, bytes, so that other
/// requests get between.
const PART_BYTES: u64 = 64 << 20;

/// Carries out the requests of a slot until the session closes.
pub(super) async fn serve(session: Rc<Session>, slot: Rc<Slot>) {
    loop {
        slot.work.park(session.ring()).await;
        let Some(request) = slot.request.take() else {
            if session.is_closing.get() {
                return;
            }
            continue;
        };
        if let Err(refusal) = carry_out(&session, &slot, &request).await {
            if let Some(errno) = refusal.cause {
                let &Request { offset, len, command, .. } = &request;
                session.export.errors.record(command_name(command), offset, Bytes(len), errno);
            }
            session.refuse(&slot, &request, &refusal);
        }
    }
}

/// Carries out a request and answers it.
///
/// Errors: what the client is told; it is not answered then.
async fn carry_out(session: &Session, slot: &Slot, request: &Request) -> Result<(), Refusal> {
    let (ring, disk) = (session.ring(), &session.export.disk);
    let cells = &session.queue.cells;
    let &Request { offset, len, .. } = request;
    match request.command {
        command::READ => {
            // Not above 32 MiB, as it was judged.
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            read(session, slot, request, len).await.map_err(failed)?;
            cells.reads.add(1);
            cells.read_bytes.add(len as u64);
            return Ok(());
        }
        command::WRITE => {
            write(session, slot, request).await.map_err(failed)?;
            cells.writes.add(1);
            cells.write_bytes.add(len);
        }
        command::FLUSH => disk.flush(ring).await.map_err(failed)?,
        command::TRIM => discard(session, offset, len).await.map_err(failed)?,
        command::CACHE => prefetch(session, slot, offset, len).await.map_err(failed)?,
        command::WRITE_ZEROES => zero(session, request).await?,
        // Rare, and its state is large: apart from the task's own.
        command::BLOCK_STATUS => return Box::pin(status::status(session, slot, request)).await,
        _ => return Err(Refusal::new(errno::EINVAL, "invalid request type")),
    }
    let is_change =
        matches!(request.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
    if is_change && request.flags & flags::FUA != 0 {
        disk.flush(ring).await.map_err(failed)?;
    }
    session.answer(slot, request);
    Ok(())
}

/// A command in the words of the log.
fn command_name(command: u16) -> &'static str {
    match command {
        command::READ => "a read",
        command::WRITE => "a write",
        command::FLUSH => "a flush",
        command::TRIM => "a discard",
        command::WRITE_ZEROES => "a write of zeroes",
        _ => "a request",
    }
}

/// Reads, and answers.
async fn read(session: &Session, slot: &Slot, request: &Request, len: usize) -> Result<(), Errno> {
    // Once, whatever it consists of.
    session.export.disk.pass_limits(session.ring(), Kind::Read, Bytes(request.len)).await;
    let may_have_holes =
        session.style != Style::Simple && len >= HOLES_FROM_BYTES && request.flags & flags::DF == 0;
    if may_have_holes {
        find_runs(session, slot, request.offset, len).await?;
        let has_holes = slot.runs.borrow().iter().any(|run| run.is_hole);
        if has_holes {
            let count = slot.runs.borrow().len();
            for index in 0..count {
                let run = slot.runs.borrow()[index];
                if !run.is_hole {
                    read_part(session, slot, request.offset, run).await?;
                }
            }
            session.answer_runs(slot, request);
            return Ok(());
        }
    }
    read_part(session, slot, request.offset, Run { at: 0, len, is_hole: false }).await?;
    session.answer_data(slot, request, len);
    Ok(())
}

/// Reads one run into its place in the memory of the slot.
async fn read_part(session: &Session, slot: &Slot, offset: u64, run: Run) -> Result<(), Errno> {
    if run.len == 0 {
        return Ok(());
    }
    let part = slot.data(run.at + run.len).slice(run.at..run.at + run.len);
    let disk = &session.export.disk;
    let count = disk.read_part(session.ring(), offset + run.at as u64, &part).await?;
    // Short where the disk has become smaller meanwhile.
    if count < run.len {
        part.slice(count..run.len).fill(0);
    }
    Ok(())
}

/// Finds holes of a read: only those that the tables of the image know.
async fn find_runs(session: &Session, slot: &Slot, offset: u64, len: usize) -> Result<(), Errno> {
    let view = session.export.disk.view().await;
    let mut at = 0;
    while at < len {
        let left = len - at;
        let (mut is_hole, mut count) = (false, left);
        if slot.runs.borrow().len() + 1 < RUNS_MAX {
            let mapped = view.map(session.ring(), offset + at as u64, Bytes::of(left)).await?;
            let (zero, bytes) = match mapped.mapping {
                Mapping::Zero { len } => (true, len),
                Mapping::Data { len, .. } | Mapping::ReadOnly { len } => (false, len),
                Mapping::PastEnd => (false, Bytes::of(left)),
            };
            count = usize::try_from(bytes).unwrap_or(usize::MAX).min(left).max(1);
            is_hole = zero && count >= HOLE_ROOM_BYTES;
        }
        push_run(&mut slot.runs.borrow_mut(), Run { at, len: count, is_hole });
        at += count;
    }
    Ok(())
}

/// Appends a run, as a part of the last one where the two are alike.
fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut().filter(|last| last.is_hole == run.is_hole) {
        Some(last) => last.len += run.len,
        None => runs.push(run),
    }
}

/// Writes the data of the slot.
async fn write(session: &Session, slot: &Slot, request: &Request) -> Result<(), Errno> {
    let (ring, disk) = (session.ring(), &session.export.disk);
    let len = usize::try_from(request.len).unwrap_or(usize::MAX);
    let data = slot.data(len);
    let mut done = 0;
    while done < len {
        let rest = if done == 0 { data.clone() } else { data.slice(done..len) };
        match disk.write(ring, request.offset + done as u64, &rest).await? {
            // The disk has become smaller meanwhile.
            0 => return Err(Errno::NOSPC),
            count => done += count,
        }
    }
    Ok(())
}

/// The parts of a long range: first byte and length.
fn parts(offset: u64, len: u64) -> impl Iterator<Item = (u64, Bytes)> {
    let starts = (0..len).step_by(usize::try_from(PART_BYTES).unwrap_or(usize::MAX));
    starts.map(move |at| (offset + at, Bytes(PART_BYTES.min(len - at))))
}

/// Discards; where the storage cannot, that is none of the client's business.
async fn discard(session: &Session, offset: u64, len: u64) -> Result<(), Errno> {
    for (offset, len) in parts(offset, len) {
        match session.export.disk.discard(session.ring(), offset, len).await {
            Err(Errno::OPNOTSUPP) => return Ok(()),
            result => result?,
        }
    }
    Ok(())
}

/// Reads into memory that is not used, so that the page cache has the range.
async fn prefetch(session: &Session, slot: &Slot, offset: u64, len: u64) -> Result<(), Errno> {
    let disk = &session.export.disk;
    if disk.cache().direct() {
        return Ok(());
    }
    let mut at = 0;
    while at < len {
        let left = usize::try_from(len - at).unwrap_or(usize::MAX).min(SMALL_BYTES);
        disk.read(session.ring(), offset + at, &slot.data(left)).await?;
        at += left as u64;
    }
    Ok(())
}

/// Writes zeroes.
///
/// Errors: ENOTSUP for zeroes that shall be fast and are not known to be; nothing has changed then,
/// or the range is zeroes in part.
async fn zero(session: &Session, request: &Request) -> Result<(), Refusal> {
    let (ring, disk) = (session.ring(), &session.export.disk);
    let may_unmap = request.flags & flags::NO_HOLE == 0;
    let is_fast = request.flags & flags::FAST_ZERO != 0;
    if is_fast && !may_unmap {
        return Err(Refusal::new(
            errno::ENOTSUP,
            "zeroes that take space are not known to be fast",
        ));
    }
    for (offset, len) in parts(request.offset, request.len) {
        let result = if is_fast {
            disk.punch(ring, offset, len).await
        } else {
            disk.write_zeroes(ring, offset, len, may_unmap).await
        };
        result.map_err(failed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_range_is_cut_into_parts() {
        assert_eq!(parts(5, 0).count(), 0);
        assert_eq!(parts(5, 7).collect::<Vec<_>>(), [(5, Bytes(7))]);
        let cut: Vec<_> = parts(1, PART_BYTES + 1).collect();
        assert_eq!(cut, [(1, Bytes(PART_BYTES)), (1 + PART_BYTES, Bytes(1))]);
    }

    #[test]
    fn runs_that_are_alike_become_one() {
        let mut runs = Vec::new();
        for (at, len, is_hole) in [(0, 4, false), (4, 4, false), (8, 200, true), (208, 1, true)] {
            push_run(&mut runs, Run { at, len, is_hole });
        }
        let expected =
            [Run { at: 0, len: 8, is_hole: false }, Run { at: 8, len: 201, is_hole: true }];
        assert_eq!(runs, expected);
    }
}
