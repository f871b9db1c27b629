//! Front ends that do their worst: wrong sizes, descriptors, order, indexes; any bytes.

use proptest::prelude::*;

use super::*;

/// Sizes of the payload that a request may have, out of those that are tried, and how many
/// descriptors.
fn shapes(request: Request) -> (&'static [usize], usize) {
    use Request as R;
    match request {
        R::GetFeatures
        | R::SetOwner
        | R::ResetOwner
        | R::GetProtocolFeatures
        | R::GetQueueNum
        | R::ResetDevice
        | R::GetMaxMemSlots
        | R::GetStatus
        | R::CheckDeviceState => (&[0], 0),
        R::SetFeatures
        | R::SetVringNum
        | R::SetVringBase
        | R::GetVringBase
        | R::SetProtocolFeatures
        | R::SetVringEnable
        | R::SetStatus => (&[8], 0),
        R::SetVringKick | R::SetVringCall | R::SetVringErr | R::SetDeviceStateFd => (&[8], 1),
        R::SetMemTable => (&[40], 1),
        R::SetLogBase => (&[16], 1),
        R::SetLogFd | R::SetBackendReqFd => (&[0, 8], 1),
        R::SetVringAddr => (&[40], 0),
        R::GetConfig => (&[12, 16], 0),
        R::SetConfig => (&[16], 0),
        R::GetInflightFd => (&[20, 24], 0),
        R::SetInflightFd => (&[20, 24], 1),
        R::AddMemReg => (&[40], 1),
        R::RemMemReg => (&[40], 0),
    }
}

/// A payload that means something, as far as it goes: one region, or four bytes of configuration
/// space.
fn payload(request: Request, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    match request {
        Request::SetMemTable => bytes[0] = 1,
        Request::GetConfig | Request::SetConfig => bytes[4] = 4,
        _ => {}
    }
    bytes.truncate(len);
    bytes
}

fn fds(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| eventfd()).collect()
}

fn is_malformed(result: Result<Answer, Error>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::Protocol)
}

#[test]
fn a_wrong_size_ends_the_connection() {
    for &request in Request::ALL {
        let (sizes, count) = shapes(request);
        // A larger table is room for more regions.
        let top = if request == Request::SetMemTable { 40 } else { 64 };
        for size in 0..=top {
            let mut peer = Peer::negotiated();
            let result = peer.handle(request, &payload(request, size), fds(count));
            let wrong = !sizes.contains(&size);
            assert_eq!(is_malformed(result), wrong, "{} with {size} bytes", request.name());
        }
    }
}

#[test]
fn a_wrong_number_of_descriptors_ends_the_connection_and_closes_them() {
    for &request in Request::ALL {
        let (sizes, count) = shapes(request);
        for wrong in (0..=3).filter(|wrong| *wrong != count) {
            // One that is to be closed is told of by the specification.
            let allowed = request == Request::RemMemReg && wrong == 1;
            let mut peer = Peer::negotiated();
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            let given = (0..wrong).map(|_| writer.try_clone().unwrap()).collect();
            drop(writer);
            let result = peer.handle(request, &payload(request, sizes[0]), given);
            assert_eq!(is_malformed(result), !allowed, "{} with {wrong}", request.name());
            assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "still open");
        }
    }
}

#[test]
fn another_version_or_a_reply_ends_the_connection() {
    let mut peer = Peer::negotiated();
    for flags in [0, 2, 3, 1 | 1 << 2] {
        for number in [1, 99] {
            let header = Header { request: number, flags, size: 0 };
            let result = peer.session.handle(&mut peer.mock, &header, &[], Vec::new());
            assert!(is_malformed(result), "flags {flags}");
        }
    }
}

#[test]
fn an_unknown_request_is_refused() {
    let mut peer = Peer::negotiated();
    for number in [0, 19, 28, 35, 41, 44, 45, u32::MAX] {
        let ask = |flags| Header { request: number, flags, size: 0 };
        let error = peer.session.handle(&mut peer.mock, &ask(1), &[], fds(1)).unwrap_err();
        assert_eq!(error.to_string(), format!("request {number}: not known"));
        let answer = peer.session.handle(&mut peer.mock, &ask(9), &[], fds(1)).unwrap();
        assert_eq!(answer.reply.unwrap().payload(), 1u64.as_bytes());
    }
}

#[test]
fn what_was_not_negotiated_is_refused_and_does_nothing() {
    for &request in Request::ALL.iter().filter(|request| request.feature() != 0) {
        let mut peer = Peer::new();
        peer.tell(Request::SetProtocolFeatures, features::ALL & !request.feature());
        let (sizes, count) = shapes(request);
        let why = peer.refused(request, &payload(request, sizes[0]), fds(count));
        let feature = features::name(request.feature());
        assert_eq!(why, format!("{}: {feature} was not negotiated", request.name()));
        assert_eq!(peer.mock.taken(), [""; 0]);
    }
}

#[test]
fn what_was_not_offered_is_refused() {
    let mut peer = Peer::new();
    for bit in (0..64).map(|bit| 1u64 << bit).filter(|bit| features::ALL & bit == 0) {
        peer.refused(Request::SetProtocolFeatures, bit.as_bytes(), Vec::new());
    }
    for bit in [1_u64 << 35, 1 << 33, 1 << 40, 1 << 63] {
        peer.refused(Request::SetFeatures, bit.as_bytes(), Vec::new());
    }
    assert_eq!((peer.session.features(), peer.session.protocol_features()), (0, 0));
    let mut small = Session::new(SessionConfig { protocol_features: u64::MAX, ..config() });
    let header = Header::request(15, 0, false);
    let answer = small.handle(&mut peer.mock, &header, &[], Vec::new()).unwrap();
    assert_eq!(answer.reply.unwrap().payload(), features::ALL.as_bytes());
}

#[test]
fn a_virtqueue_that_does_not_exist_is_refused() {
    for index in [64, 255, 256, 0x1_0000, u32::MAX] {
        for request in [
            Request::SetVringNum,
            Request::SetVringBase,
            Request::GetVringBase,
            Request::SetVringEnable,
        ] {
            let payload = VringState { index, num: 1 };
            let why = Peer::with_memory().refused(request, payload.as_bytes(), Vec::new());
            assert!(why.ends_with(&format!("there is no virtqueue {index}, there are 64")));
        }
        let address = Peer::address(0, 0);
        let address = VringAddress { index, ..address };
        Peer::with_memory().refused(Request::SetVringAddr, address.as_bytes(), Vec::new());
    }
    for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
        Peer::with_memory().refused(request, 64u64.as_bytes(), fds(1));
        Peer::with_memory().refused(request, 0x200u64.as_bytes(), fds(1));
        assert!(is_malformed(Peer::with_memory().handle(request, 0x100u64.as_bytes(), fds(1))));
    }
}

#[test]
fn sizes_addresses_and_flags_that_cannot_be_are_refused() {
    let mut peer = Peer::with_memory();
    for num in [0, 1025, 0x1_0001, u32::MAX] {
        let payload = VringState { index: 0, num };
        peer.refused(Request::SetVringNum, payload.as_bytes(), Vec::new());
    }
    let sound = Peer::address(0, 0);
    for address in [
        VringAddress { descriptor: 0, ..sound },
        VringAddress { available: 0, ..sound },
        VringAddress { used: 0, ..sound },
        VringAddress { descriptor: 0x1008, ..sound },
        VringAddress { available: 0x1001, ..sound },
        VringAddress { used: 0x1002, ..sound },
        VringAddress { flags: 2, ..sound },
    ] {
        peer.refused(Request::SetVringAddr, address.as_bytes(), Vec::new());
    }
    let payload = VringState { index: 0, num: 2 };
    peer.refused(Request::SetVringEnable, payload.as_bytes(), Vec::new());
    peer.refused(Request::SetVringKick, 0x100u64.as_bytes(), Vec::new());
    peer.refused(Request::SetStatus, 0x100u64.as_bytes(), Vec::new());
    for payload in [[2u32, 0], [0, 1]] {
        peer.refused(Request::SetDeviceStateFd, payload.as_bytes(), fds(1));
    }
    for payload in [[0, 0], [u64::MAX, 1]] {
        peer.refused(Request::SetLogBase, payload.as_bytes(), fds(1));
    }
    for (num_queues, queue_size) in [(0, 1), (65, 1), (1, 0), (1, 1025)] {
        let area = Inflight { mmap_size: 1, num_queues, queue_size, ..Inflight::default() };
        peer.refused(Request::GetInflightFd, area.as_bytes(), Vec::new());
        peer.refused(Request::SetInflightFd, area.as_bytes(), fds(1));
    }
    assert_eq!(peer.mock.taken(), [""; 0]);
}

#[test]
fn memory_is_bounded_and_does_not_wrap() {
    let mut peer = Peer::negotiated();
    for (guest_addr, size, user_addr, mmap_offset) in
        [(0, 0, 0, 0), (u64::MAX, 1, 0, 0), (0, 1, u64::MAX, 0), (0, 2, 0, u64::MAX - 1)]
    {
        let region = Region { guest_addr, size, user_addr, mmap_offset };
        let single = SingleRegion { padding: 0, region };
        peer.refused(Request::AddMemReg, single.as_bytes(), fds(1));
        let table = [[1u32, 0].as_bytes(), region.as_bytes()].concat();
        peer.refused(Request::SetMemTable, &table, fds(1));
    }
    assert_eq!(peer.mock.taken(), [""; 0]);
    for index in 0..32 {
        peer.add_region(index << 20, 1 << 20, 0x7f00_0000_0000 + (index << 20));
    }
    let region = Region { guest_addr: 1 << 40, size: 1, user_addr: 1, mmap_offset: 0 };
    let single = SingleRegion { padding: 0, region };
    let why = peer.refused(Request::AddMemReg, single.as_bytes(), fds(1));
    assert_eq!(why, "ADD_MEM_REG: 33 regions, at most 32 are possible");
    let why = peer.refused(Request::RemMemReg, single.as_bytes(), Vec::new());
    assert!(why.starts_with("REM_MEM_REG: no region of 0x1 bytes"), "{why}");
    let same = [region.as_bytes(), region.as_bytes()].concat();
    let why = peer.refused(Request::SetMemTable, &[[2u32, 0].as_bytes(), &same].concat(), fds(2));
    assert!(why.contains("overlaps"), "{why}");
    let head = [u32::MAX, 0];
    assert!(is_malformed(peer.handle(Request::SetMemTable, head.as_bytes(), Vec::new())));
}

#[test]
fn a_refused_table_leaves_the_one_before() {
    let mut peer = Peer::with_memory();
    peer.mock.refuse.insert("set_memory");
    let region = Region { guest_addr: 1 << 40, size: 1, user_addr: 1, mmap_offset: 0 };
    let table = [[1u32, 0].as_bytes(), region.as_bytes()].concat();
    peer.refused(Request::SetMemTable, &table, fds(1));
    peer.remove_region(0, 0x10_0000, 0x7f00_0000_0000);
}

#[test]
fn configuration_space_is_bounded() {
    let mut peer = Peer::negotiated();
    for size in [4097, u32::MAX] {
        let head = [0u32, size, 0];
        assert!(is_malformed(peer.handle(Request::GetConfig, head.as_bytes(), Vec::new())));
    }
    assert_eq!(peer.get_config(u32::MAX, 8), [0; 8]);
    let write = [[0u32, 1, 7].as_bytes(), &[1]].concat();
    let why = peer.refused(Request::SetConfig, &write, Vec::new());
    assert_eq!(why, "SET_CONFIG: unknown flags 0x7");
}

/// Numbers that mean something now and then.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..4_u64,
        Just(64),
        Just(0x100),
        Just(SPLIT),
        Just(features::ALL),
        (0..16_u64).prop_map(|page| 0x7f00_0000_0000 + page * 0x1000),
        any::<u64>(),
    ]
}

/// A request, its flags, its payload and how many descriptors.
type Loose = (u32, u32, Vec<u8>, usize);

fn message() -> impl Strategy<Value = Loose> {
    let sound = (any::<prop::sample::Index>(), prop::collection::vec(number(), 6), any::<bool>())
        .prop_map(|(which, numbers, need_reply)| {
            let request = *which.get(Request::ALL);
            let (sizes, count) = shapes(request);
            let wide: Vec<u8> = numbers.as_bytes().to_vec();
            let narrow: Vec<u32> = numbers.iter().map(|number| (*number & 0xffff) as u32).collect();
            let bytes = if sizes[0] == 8 && count == 0 && request.feature() == 0 {
                [narrow.as_bytes(), &wide].concat()
            } else {
                wide
            };
            let flags = if need_reply { 9 } else { 1 };
            (request as u32, flags, bytes[..sizes[sizes.len() - 1]].to_vec(), count)
        });
    let loose = (0..50_u32, 0..16_u32, prop::collection::vec(any::<u8>(), 0..100), 0..4_usize);
    prop_oneof![8 => sound, 1 => loose]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// The mock back end insists on what a session promises.
    #[test]
    fn any_messages_keep_the_promises(
        messages in prop::collection::vec(message(), 1..80),
        refuse in prop::sample::subsequence(vec!["start", "stop", "set_memory", "call"], 0..2),
        ready in any::<bool>(),
    ) {
        let mut peer = if ready { Peer::with_memory() } else { Peer::new() };
        peer.set_up_if(ready);
        peer.mock.refuse = refuse.into_iter().collect();
        for (number, flags, payload, count) in messages {
            let header = Header { request: number, flags,
            size: u32::try_from(payload.len()).unwrap() };
            let result = peer.session.handle(&mut peer.mock, &header, &payload, fds(count));
            match result {
                Ok(answer) => {
                    if let Some(reply) = answer.reply {
                        prop_assert_eq!(reply.bytes()[..4].to_vec(), number.as_bytes().to_vec());
                        let size = u32::read_from_bytes(&reply.bytes()[8..12]).unwrap();
                        prop_assert_eq!(size as usize, reply.payload().len());
                    }
                }
                Err(error) => {
                    prop_assert!(!error.to_string().is_empty());
                    peer.session.close(&mut peer.mock);
                }
            }
            prop_assert_eq!(peer.session.running(), peer.mock.running.len());
        }
        peer.session.close(&mut peer.mock);
        prop_assert!(peer.mock.running.is_empty());
    }
}

impl Peer {
    /// A ring that runs, for tests that go on from there.
    fn set_up_if(&mut self, ready: bool) {
        if ready {
            self.set_up(0, 8);
            self.vring(Request::SetVringEnable, 0, 1);
        }
    }
}
