//! Queues made by hand and their buffer pools: what is refused, that a refusal of these harms
//! nothing, and how buffers are shared. Linux 7.3.

use ringdisk_ring::{CpuList, Errno, RawCommand, Topology};
use ringdisk_testkit::limits::needs;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use crate::kernel_orders::entry::{Entry, Pool, Register};
use crate::kernel_orders::wire::{Wire, possible_cpus};

const ZERO_COPY: u64 = 1;

/// A mount on which io_uring is agreed, on a kernel with pools.
pub(crate) fn with_pools() -> Option<Wire> {
    let wire = Wire::negotiated()?;
    needs("FUSE buffer pools (Linux 7.3)", wire.has_pools()).then_some(wire)
}

/// Makes all queues, each with a pool of `buffers` and `entries` entries, and goes live.
fn go_live(wire: &mut Wire, buffers: usize, entries: usize) {
    for queue in 0..possible_cpus() {
        // Whichever exists already is one that the test has made.
        let made = wire.add_queue(queue, 0);
        assert!(matches!(made, Ok(_) | Err(Errno::EXIST)), "{made:?}");
        let pool = wire.new_pool(buffers);
        wire.add_pool(queue, &pool, None).expect("a pool");
        for _ in 0..entries {
            let entry = wire.new_entry_of(&pool);
            wire.register(queue, entry);
        }
    }
}

fn serves_in_rings(wire: &mut Wire) {
    let (got, _, by_entry) = wire.serve_client(100_000);
    assert_eq!(got.expect("a read"), vec![0; 100_000]);
    assert!(by_entry > 0, "not over /dev/fuse");
}

#[test]
fn entries_with_a_pool_serve() {
    let Some(mut wire) = with_pools() else { return };
    go_live(&mut wire, 2, 4);
    serves_in_rings(&mut wire);
}

#[test]
fn a_queue_that_cannot_be_is_refused_and_harms_nothing() {
    let Some(mut wire) = with_pools() else { return };
    assert_eq!(wire.add_queue(possible_cpus(), 0), Err(Errno::INVAL));
    assert_eq!(wire.add_queue(u16::MAX, 0), Err(Errno::INVAL));
    assert_eq!(wire.add_queue(0, 2), Err(Errno::INVAL));
    assert_eq!(wire.add_queue(0, 1 << 63), Err(Errno::INVAL));
    go_live(&mut wire, 1, 1);
    serves_in_rings(&mut wire);
}

#[test]
fn a_queue_is_made_once() {
    let Some(mut wire) = with_pools() else { return };
    assert!(wire.add_queue(0, 0).is_ok());
    assert_eq!(wire.add_queue(0, 0), Err(Errno::EXIST));
    assert_eq!(wire.add_queue(0, ZERO_COPY), Err(Errno::EXIST));
    go_live(&mut wire, 1, 1);
    serves_in_rings(&mut wire);
}

#[test]
fn register_makes_the_queue_that_is_missing_without_a_pool() {
    let Some(mut wire) = with_pools() else { return };
    let entry = wire.new_entry();
    let index = wire.register(0, entry);
    let sent = wire.entries[index].sent.clone();
    assert!(wire.pends(&sent));
    assert_eq!(wire.add_queue(0, 0), Err(Errno::EXIST));
    let pool = wire.new_pool(1);
    assert_eq!(wire.add_pool(0, &pool, None), Err(Errno::INVAL), "entries are there already");
    for queue in 1..possible_cpus() {
        let entry = wire.new_entry();
        wire.register(queue, entry);
    }
    serves_in_rings(&mut wire);
}

#[test]
fn pools_that_are_wrong_are_refused_and_harm_nothing() {
    let Some(mut wire) = with_pools() else { return };
    let good = wire.new_pool(2);
    assert_eq!(wire.add_pool(0, &good, None), Err(Errno::INVAL), "no queue");
    assert!(wire.add_queue(0, 0).is_ok());
    let wrong: [(&str, Pool); 5] = [
        ("too short", Pool { len: wire.payload_len() - 1, ..good.clone() }),
        ("empty", Pool { len: 0, ..good.clone() }),
        ("flags", Pool { flags: 1, ..good.clone() }),
        ("all flags", Pool { flags: u64::MAX, ..good.clone() }),
        ("reserved", Pool { reserved: 1, ..good.clone() }),
    ];
    for (what, pool) in &wrong {
        assert_eq!(wire.add_pool(0, pool, None), Err(Errno::INVAL), "{what}");
    }
    assert_eq!(wire.add_pool(possible_cpus(), &good, None), Err(Errno::INVAL), "no such CPU");
    go_live(&mut wire, 2, 2);
    serves_in_rings(&mut wire);
}

#[test]
fn a_queue_has_one_pool_before_its_first_entry() {
    let Some(mut wire) = with_pools() else { return };
    assert!(wire.add_queue(0, 0).is_ok());
    let pool = wire.new_pool(1);
    assert!(wire.add_pool(0, &pool, None).is_ok());
    let second = wire.new_pool(1);
    assert_eq!(wire.add_pool(0, &second, None), Err(Errno::INVAL));
    let entry = wire.new_entry_of(&pool);
    wire.register(0, entry);
    assert_eq!(wire.add_pool(0, &second, None), Err(Errno::INVAL));
    for queue in 1..possible_cpus() {
        assert!(wire.add_queue(queue, 0).is_ok());
        let entry = wire.new_entry();
        let index = wire.register(queue, entry);
        let sent = wire.entries[index].sent.clone();
        assert!(wire.pends(&sent), "a queue made by hand needs no pool");
        let late = wire.new_pool(1);
        assert_eq!(wire.add_pool(queue, &late, None), Err(Errno::INVAL), "{queue}");
    }
    serves_in_rings(&mut wire);
}

/// Bytes after the last whole buffer are not used.
#[test]
fn a_pool_is_whole_buffers_and_a_rest() {
    let Some(mut wire) = with_pools() else { return };
    for queue in 0..possible_cpus() {
        assert!(wire.add_queue(queue, 0).is_ok());
        let pool = Pool { len: wire.payload_len() * 2 - 1, ..wire.new_pool(2) };
        assert!(wire.add_pool(queue, &pool, None).is_ok());
        let entry = wire.new_entry_of(&pool);
        wire.register(queue, entry);
    }
    for _ in 0..8 {
        serves_in_rings(&mut wire);
        assert!(wire.entries.iter().all(|entry| entry.pool_offset() == 0));
    }
}

/// What REGISTER and the pool of its queue do not agree on ends io_uring for the mount, as any
/// refused REGISTER does.
///
/// * `fixed_buffer`: index by which the pool is registered.
fn register_refused(fixed_buffer: Option<u16>, spoil: impl Fn(&mut Register, &Pool)) {
    let Some(mut wire) = with_pools() else { return };
    assert!(wire.add_queue(0, 0).is_ok());
    let pool = wire.new_pool(1);
    wire.ring.register_buffers(Some(&pool.region), 0).expect("a registered region");
    assert!(wire.add_pool(0, &pool, fixed_buffer).is_ok());
    let entry = Entry { fixed_buffer, ..wire.new_entry_of(&pool) };
    let mut register = Register::of(0, &entry);
    spoil(&mut register, &pool);
    let command = wire.register_command(&register);
    assert_eq!(wire.result(command), Err(Errno::INVAL));
    let command = wire.register_command(&Register::of(0, &entry));
    assert_eq!(wire.result(command), Err(Errno::OPNOTSUPP));
    assert_eq!(wire.add_queue(1, 0), Err(Errno::OPNOTSUPP));
    let (got, by_device, _) = wire.serve_client(4096);
    assert!(got.is_ok() && by_device > 0, "{got:?}");
}

#[test]
fn an_entry_of_a_pool_has_no_payload_of_its_own() {
    register_refused(None, |register, pool| {
        register.vectors[1] = (pool.memory.address() as u64, pool.memory.len() as u64);
    });
}

#[test]
fn an_entry_names_the_buffer_of_its_registered_pool() {
    register_refused(Some(0), |register, _| register.fixed_buffer = None);
    register_refused(Some(0), |register, _| register.fixed_buffer = Some(1));
}

#[test]
fn a_slot_for_pages_of_the_client_belongs_to_zero_copy() {
    register_refused(None, |register, _| register.slot = 1);
}

#[test]
fn a_request_waits_for_a_buffer_although_an_entry_is_free() {
    let Some(mut wire) = with_pools() else { return };
    go_live(&mut wire, 1, 2);
    // One CPU is one queue.
    let cpu: CpuList = Topology::read().allowed.first().into_iter().collect();
    let first = wire.client_on(cpu.clone(), 4096);
    let held = wire.hold_a_read();
    let second = wire.client_on(cpu, 4096);
    assert!(wire.waits(&second));
    let full = (0..wire.entries.len()).filter(|index| wire.is_full(*index)).count();
    assert_eq!(full, 1, "the other entry of the queue stays empty");
    wire.serve_entry(held);
    assert!(wire.finish(&first).is_ok());
    assert!(wire.finish(&second).is_ok());
}

#[test]
fn a_registered_pool_is_named_by_every_command() {
    let Some(mut wire) = with_pools() else { return };
    let pool = wire.new_pool(possible_cpus().into());
    wire.ring.register_buffers(Some(&pool.region), 0).expect("a registered region");
    let stride = wire.payload_bytes;
    for queue in 0..possible_cpus() {
        assert!(wire.add_queue(queue, 0).is_ok());
        let start = usize::from(queue) * stride;
        let memory = pool.memory.slice(start..start + stride);
        let own = Pool { memory, len: wire.payload_len(), ..pool.clone() };
        assert!(wire.add_pool(queue, &own, Some(0)).is_ok());
        let mut entry = wire.new_entry_of(&own);
        entry.fixed_buffer = Some(0);
        wire.register(queue, entry);
    }
    serves_in_rings(&mut wire);
    // A commit without the buffer is refused, and can be repeated.
    let client = wire.client(4096);
    let index = wire.hold_a_read();
    let entry = wire.entries[index].clone();
    let reply = wire.answer(&entry.request(), &entry.payload());
    entry.put(&reply);
    let command = wire.commit_command(entry.queue, entry.commit_id());
    assert_eq!(wire.result(command.clone()), Err(Errno::INVAL), "no buffer");
    let wrong = RawCommand { fixed_buffer: Some(1), ..command };
    assert_eq!(wire.result(wrong), Err(Errno::INVAL), "another buffer");
    wire.commit_entry(index);
    assert!(wire.finish(&client).is_ok());
}

#[test]
fn zero_copy_is_for_the_administrator() {
    let Some(mut wire) = with_pools() else { return };
    let before = capabilities(None).expect("capabilities");
    let effective = before.effective.difference(CapabilitySet::SYS_ADMIN);
    set_capabilities(None, CapabilitySets { effective, ..before }).expect("fewer capabilities");
    let refused = wire.add_queue(0, ZERO_COPY);
    set_capabilities(None, before).expect("the capabilities of before");
    assert_eq!(refused, Err(Errno::PERM));
    go_live(&mut wire, 1, 1);
    serves_in_rings(&mut wire);
}

#[test]
fn zero_copy_takes_a_pool() {
    let Some(mut wire) = with_pools() else { return };
    assert!(wire.add_queue(0, ZERO_COPY).is_ok());
    let entry = wire.new_entry();
    let command = wire.register_command(&Register::of(0, &entry));
    assert_eq!(wire.result(command), Err(Errno::INVAL));
    assert_eq!(wire.add_queue(1, 0), Err(Errno::OPNOTSUPP), "and ends io_uring for this mount");
}

#[test]
fn an_entry_for_zero_copy_has_a_slot_of_any_number() {
    let Some(mut wire) = with_pools() else { return };
    assert!(wire.add_queue(0, ZERO_COPY).is_ok());
    let pool = wire.new_pool(1);
    assert!(wire.add_pool(0, &pool, None).is_ok());
    for slot in [0, 1, 500] {
        let entry = wire.new_entry_of(&pool);
        let command = wire.register_command(&Register { slot, ..Register::of(0, &entry) });
        let sent = wire.send(command);
        assert!(wire.pends(&sent), "{slot}: {:?}", sent.get());
    }
}
