//! While a request is served, each byte of it that is judged is read once: descriptors, tables, the
//! header, ranges to be zeroed. Alone in its program: reads are noted for all queue threads of the
//! process.

mod common;

use std::ops::Range;

use ringdisk_guest::Layout;
use ringdisk_guest::driver::GUEST_BASE;
use ringdisk_guest::reads::Reads;
use ringdisk_testkit::model::{VmOptions, bits, range};
use ringdisk_testkit::process::{LIMIT, until};

use common::raw::{INDIRECT, NEXT, WRITE, entry, send};
use common::{MIB, serve, simulated};

/// Far behind what queues and requests take.
const HEADER: u64 = GUEST_BASE + (200 << 20);
const RANGES: u64 = HEADER + 4096;
const STATUS: u64 = HEADER + 8192;
const TABLE: u64 = HEADER + 12288;

fn bytes(start: u64, len: u64) -> Range<u64> {
    start..start + len
}

#[test]
fn each_byte_of_a_request_that_is_judged_is_read_once() {
    for packed in [0, bits::PACKED] {
        for indirect in [false, true] {
            let (_sim, disk) = simulated(MIB);
            let served = serve(disk, |options| options.queues = 1);
            let features = VmOptions::default().features | packed;
            let mut vm = served.vm(VmOptions { features, indirect: 4, ..VmOptions::default() });
            let layout = if packed == 0 { Layout::Split } else { Layout::Packed };
            // Zeroes in three ranges, the header in two pieces.
            let mut header = [0; 16];
            header[0] = 13;
            vm.ram.write(HEADER, &header);
            let ranges = [range(1, 1, 0), range(8, 2, 1), range(100, 1, 0)].concat();
            vm.ram.write(RANGES, &ranges);
            vm.ram.write(STATUS, &[0xff]);
            let chain = [
                (HEADER, 7, NEXT, 1),
                (HEADER + 7, 9, NEXT, 2),
                (RANGES, 48, NEXT, 3),
                (STATUS, 1, WRITE, 0),
            ];
            let ring = vm.queues[0].driver.areas().descriptors.guest_addr();
            let mut judged = vec![bytes(HEADER, 16), bytes(RANGES, 48)];
            let laid = if indirect {
                for (number, descriptor) in (0..).zip(chain) {
                    let (addr, len, flags, next) = descriptor;
                    // A packed table has no other flag.
                    let flags = if packed == 0 { flags } else { flags & WRITE };
                    let entry = entry(layout, (addr, len, flags, next));
                    vm.ram.write(TABLE + number * 16, &entry);
                }
                judged.push(bytes(TABLE, 64));
                vec![(TABLE, 64, INDIRECT, 0)]
            } else {
                chain.to_vec()
            };
            let watch = Reads::of_threads("vq-");
            send(&mut vm, 0, &laid);
            let done = until(LIMIT, || {
                let mut status = [0; 1];
                vm.ram.read(STATUS, &mut status);
                (status == [0]).then_some(())
            });
            assert!(done.is_some(), "it is not answered: {:?}", served.export.broken_reason());
            let counts = watch.take();
            // Of a packed ring the flags of the first descriptor are what a thread looks at until
            // one comes.
            let first = if packed == 0 { bytes(ring, 16) } else { bytes(ring, 14) };
            judged.push(first);
            judged.push(bytes(ring + 16, 16 * (laid.len() as u64 - 1)));
            for range in judged {
                let found: Vec<u32> =
                    range.clone().map(|at| counts.get(&at).copied().unwrap_or(0)).collect();
                let expected = vec![1; found.len()];
                assert_eq!(found, expected, "{range:x?}, {layout:?}, indirect: {indirect}");
            }
        }
    }
}
