//! Chains of all shapes, completed in any order.

use proptest::collection::vec;
use proptest::prelude::*;

use crate::driver::DriverConfig;
use crate::{Layout, Log, Segment};

use super::{DATA_BYTES, Kit, base, config, device};

#[derive(Clone, Debug)]
struct Request {
    segments: Vec<(u64, u32)>,
    readable: usize,
    indirect: bool,
    written: u32,
}

fn request() -> impl Strategy<Value = Request> {
    let segment = (0..DATA_BYTES - 70_000, 1..70_000_u32);
    (vec(segment, 1..6), 0..6_usize, any::<bool>(), any::<u32>()).prop_map(
        |(segments, readable, indirect, written)| {
            let readable = readable.min(segments.len());
            Request { segments, readable, indirect, written }
        },
    )
}

fn layouts() -> impl Strategy<Value = (Layout, u16)> {
    prop_oneof![
        (1..5_u32).prop_map(|power| (Layout::Split, 1 << power)),
        (1..20_u16).prop_map(|size| (Layout::Packed, size)),
    ]
}

proptest! {
    #[test]
    fn the_same_chains_come_out_and_the_same_used_elements_come_back(
        requests in vec(request(), 1..120),
        (layout, size) in layouts(),
        event_idx in any::<bool>(),
        choices in vec(any::<usize>(), 64),
    ) {
        let mut kit = Kit::new(DriverConfig { event_idx, ..config(layout, size) });
        let mut choices = choices.into_iter().cycle();
        let mut choose = |of: usize| choices.next().unwrap_or(0) % of.max(1);
        let (mut sent, mut popped, mut done) = (Vec::new(), Vec::new(), 0);
        let fits = |r: &&Request| r.indirect || r.segments.len() <= usize::from(size);
        let mut waiting = requests.iter().filter(fits);
        let mut next = waiting.next();
        let total = requests.iter().filter(fits).count();
        while done < total {
            for _ in 0..choose(8) {
                let Some(request) = next else { break };
                let segments: Vec<Segment> = request.segments.iter()
                    .map(|(addr, len)| Segment { addr: kit.data + addr, len: *len }).collect();
                let added = match request.indirect {
                    true => kit.driver.add_indirect(&segments, request.readable),
                    false => kit.driver.add(&segments, request.readable),
                };
                let Some(id) = added else { break };
                sent.push((id, request));
                next = waiting.next();
            }
            kit.driver.publish();
            for _ in 0..choose(8) {
                let Some(token) = kit.queue.pop(&kit.view, &mut kit.chain).unwrap() else { break };
                let (id, request) = sent.remove(0);
                let got: Vec<(u64, u32)> = kit.chain.readable().iter().chain(kit.chain.writable())
                    .map(|s| (s.addr - kit.data, s.len)).collect();
                prop_assert_eq!(&got, &request.segments);
                prop_assert_eq!(kit.chain.readable().len(), request.readable);
                popped.push((id, request, token));
            }
            let mut shown = Vec::new();
            for _ in 0..choose(8) {
                if popped.is_empty() { break }
                let (id, request, token) = popped.swap_remove(choose(popped.len()));
                kit.queue.complete(token, request.written);
                shown.push((id, request.written));
            }
            prop_assert!(kit.driver.pop_used().is_none());
            kit.queue.publish();
            for expected in shown {
                let used = kit.driver.pop_used().unwrap();
                prop_assert_eq!((used.id, used.len), expected);
                done += 1;
            }
            prop_assert!(kit.driver.pop_used().is_none());
        }
        prop_assert_eq!((kit.queue.in_flight(), kit.driver.in_flight()), (0, 0));
    }
}

#[test]
fn indexes_wrap_many_times() {
    for (layout, size) in
        [(Layout::Split, 4), (Layout::Split, 256), (Layout::Packed, 5), (Layout::Packed, 256)]
    {
        let mut kit = Kit::new(config(layout, size));
        let mut tokens = Vec::with_capacity(usize::from(size));
        let (mut done, mut kicks, mut calls) = (0_u32, 0, 0);
        while done < 300_000 {
            kit.queue.enable_kicks();
            kit.driver.enable_calls();
            while kit.driver.free() >= 2 {
                let head = Segment { addr: kit.data, len: 16 };
                let data = Segment { addr: kit.data + 4096, len: 512 };
                assert!(kit.driver.add(&[head, data], 1).is_some());
            }
            kicks += u32::from(kit.driver.publish());
            while let Some(token) = kit.queue.pop(&kit.view, &mut kit.chain).unwrap() {
                tokens.push(token);
            }
            while let Some(token) = tokens.pop() {
                kit.queue.complete(token, 512);
            }
            calls += u32::from(kit.queue.publish());
            while kit.driver.pop_used().is_some() {
                done += 1;
            }
        }
        // One of each for a batch.
        let batches = done / u32::from(size / 2);
        assert_eq!((kicks, calls), (batches, batches), "{layout:?} {size}");
    }
}

#[test]
fn a_thousand_segments_in_one_chain_are_taken() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut kit = Kit::new(DriverConfig { indirect: 1026, ..config(layout, 64) });
        let segments: Vec<Segment> =
            (0..1026).map(|n| Segment { addr: kit.data + n * 512, len: 512 }).collect();
        kit.driver.add_indirect(&segments, 1).unwrap();
        kit.driver.publish();

        let token = kit.queue.pop(&kit.view, &mut kit.chain).unwrap().unwrap();

        assert_eq!(kit.chain.writable(), &segments[1..]);
        assert_eq!((kit.chain.readable_len(), kit.chain.writable_len()), (512, 1025 * 512));
        kit.queue.complete(token, 1);
    }
}

#[test]
fn bytes_cut_anywhere_are_read_and_written_as_one_stream() {
    let mut kit = Kit::new(config(Layout::Split, 16));
    let cuts = [3, 1, 12, 500, 9, 1, 6];
    let mut at = kit.data;
    let segments: Vec<Segment> = cuts
        .iter()
        .map(|len| {
            at += 1000;
            Segment { addr: at, len: *len }
        })
        .collect();
    kit.driver.add(&segments, 4).unwrap();
    kit.driver.publish();
    for (number, segment) in (0u8..).zip(&segments) {
        kit.ram.write(segment.addr, &vec![number; segment.len as usize]);
    }
    let _token = kit.queue.pop(&kit.view, &mut kit.chain).unwrap().unwrap();

    let mut head = [9; 16];
    assert!(kit.chain.read(&kit.view, 0, &mut head));
    let mut data = Vec::new();
    assert!(kit.chain.readable_pieces(&kit.view, 15..20, |piece| data.push(piece.to_vec())));
    assert!(kit.chain.write(&kit.view, 8, &[0xaa, 0xbb, 0xcc]));

    assert_eq!(head, [0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]);
    assert_eq!(data, [vec![2], vec![3; 4]]);
    let last = |number: usize, at: u64| {
        let mut byte = [0];
        kit.ram.read(segments[number].addr + at, &mut byte);
        byte[0]
    };
    assert_eq!((last(4, 8), last(5, 0), last(6, 0), last(6, 1)), (0xaa, 0xbb, 0xcc, 6));
    assert!(!kit.chain.read(&kit.view, 501, &mut head));
    assert!(!kit.chain.write(&kit.view, 14, &head));
    assert!(!kit.chain.writable_pieces(&kit.view, 0..17, |_| ()));
    assert!(kit.chain.writable_pieces(&kit.view, 16..16, |_| panic!("it is empty")));
}

#[test]
fn a_queue_goes_on_where_another_one_stopped() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut kit = Kit::new(config(layout, 4));
        let segment = Segment { addr: kit.data, len: 1 };
        for round in 0..50_u32 {
            kit.driver.add(&[segment], 0).unwrap();
            kit.driver.add(&[segment], 0).unwrap();
            kit.driver.publish();
            let token = kit.queue.pop(&kit.view, &mut kit.chain).unwrap().unwrap();
            kit.queue.complete(token, round);
            assert!(!kit.driver.has_used());
            let (next, view) = device(&kit.ram, &kit.driver, 0, None, None);
            let (base, _call) = std::mem::replace(&mut kit.queue, next).stop();
            (kit.queue, kit.view) = device(&kit.ram, &kit.driver, base, None, None);
            drop(view);
            let token = kit.queue.pop(&kit.view, &mut kit.chain).unwrap().unwrap();
            assert!(kit.queue.pop(&kit.view, &mut kit.chain).unwrap().is_none());
            kit.queue.complete(token, round);
            kit.queue.publish();
            assert_eq!(kit.driver.pop_used().unwrap().len, round);
            assert_eq!(kit.driver.pop_used().unwrap().len, round);
            assert_eq!(kit.driver.in_flight(), 0);
        }
    }
}

#[test]
fn without_event_idx_flags_say_whether_to_tell() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut kit = Kit::new(DriverConfig { event_idx: false, ..config(layout, 8) });
        let segment = Segment { addr: kit.data, len: 1 };
        let mut round = |kicks: bool, calls: bool| {
            match kicks {
                true => assert!(!kit.queue.enable_kicks()),
                false => kit.queue.disable_kicks(),
            }
            match calls {
                true => assert!(!kit.driver.enable_calls()),
                false => kit.driver.disable_calls(),
            }
            kit.driver.add(&[segment], 0).unwrap();
            let kick = kit.driver.publish();
            let token = kit.queue.pop(&kit.view, &mut kit.chain).unwrap().unwrap();
            kit.queue.complete(token, 0);
            let call = kit.queue.publish();
            kit.driver.pop_used().unwrap();
            (kick, call)
        };
        // The first batch is always told.
        assert_eq!(round(true, false), (true, true));
        assert_eq!(round(false, true), (false, true));
        assert_eq!(round(true, false), (true, false));
        assert_eq!(round(false, false), (false, false));
    }
}

#[test]
fn work_that_came_before_kicks_were_asked_for_is_seen() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut kit = Kit::new(config(layout, 8));
        kit.driver.add(&[Segment { addr: kit.data, len: 1 }], 0).unwrap();
        kit.driver.publish();

        assert!(kit.queue.enable_kicks());
        let (mut again, _view) = device(&kit.ram, &kit.driver, base(layout), None, None);
        assert!(again.has_next());
    }
}

#[test]
fn writes_to_rings_and_buffers_are_logged() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut kit = Kit::new(config(layout, 8));
        let bytes = (crate::driver::GUEST_BASE + kit.ram.size()) / 4096 / 8;
        let fd = rustix::fs::memfd_create(c"log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        let twin = fd.try_clone().unwrap();
        let log = Log::map(fd, bytes, 0).unwrap();
        kit.queue.set_log(Some(log.clone()));
        kit.driver.add(&[Segment { addr: kit.data + 8192, len: 5000 }], 0).unwrap();
        kit.driver.publish();
        let token = kit.queue.pop(&kit.view, &mut kit.chain).unwrap().unwrap();
        kit.chain.mark_written(&log, 10_000);
        kit.queue.complete(token, 5000);
        kit.queue.publish();

        let is_marked = |addr: u64| {
            let mut byte = [0];
            rustix::io::pread(&twin, &mut byte, addr / 4096 / 8).unwrap();
            byte[0] & (1 << (addr / 4096 % 8)) != 0
        };
        let areas = kit.driver.areas();
        let ring = if layout == Layout::Split { &areas.device } else { &areas.descriptors };
        assert!(is_marked(ring.guest_addr()));
        assert!(is_marked(kit.data + 8192) && is_marked(kit.data + 12288));
        assert!(!is_marked(kit.data + 16384) && !is_marked(kit.data));
    }
}

#[test]
fn an_address_for_the_log_that_runs_over_is_survived() {
    let mut kit = Kit::new(config(Layout::Split, 8));
    let fd = rustix::fs::memfd_create(c"log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    kit.queue.set_log(Some(Log::map(fd, 4096, 0).unwrap()));
    kit.queue.set_log_addr(Some(u64::MAX - 1));
    kit.driver.add(&[Segment { addr: kit.data, len: 1 }], 0).unwrap();
    kit.driver.publish();

    let token = kit.queue.pop(&kit.view, &mut kit.chain).unwrap().unwrap();
    kit.queue.complete(token, 1);
    kit.queue.publish();
    kit.queue.enable_kicks();

    assert_eq!(kit.driver.pop_used().map(|used| used.len), Some(1));
}
