use ringdisk_testkit::sim::Prng;

use super::*;
use crate::btf::make::Maker;

/// What two modules agree on unless a test changes one of them.
#[derive(Clone, Debug)]
struct Module {
    /// Bits of a member of vhost_dev, from its start.
    place: u32,
    /// Bytes of vhost_dev.
    bytes: u32,
    /// A member of a structure inside vhost_virtqueue.
    inside: u32,
    /// Bits of a member of a union without a name.
    nameless: u32,
    /// Whether vhost_iotlb is there.
    iotlb: bool,
    /// What the function takes besides the device: 0: nothing, 1: a number, 2: that number, tagged
    /// and constant.
    takes: u32,
    /// Its name.
    function: &'static str,
    /// vhost_work has one more member.
    more: bool,
}

const SAME: Module = Module {
    place: 64,
    bytes: 24,
    inside: 0,
    nameless: 0,
    iotlb: true,
    takes: 1,
    function: "vhost_stop",
    more: false,
};

/// Types of the kernel: int is 1, a pointer to void 2.
fn base() -> Maker {
    let mut maker = Maker::base();
    maker.int("int", 4);
    maker.pointer(0);
    maker.structure("list_head", 16, &[("next", 2, 0), ("prev", 2, 64)]);
    maker
}

/// Types of a module; `ours`: it has a structure with its calls, in place of functions.
fn module(maker: &mut Maker, module: &Module, ours: bool) {
    let (int, pointer) = (1, 2);
    let device =
        maker.structure("vhost_dev", module.bytes, &[("a", pointer, 0), ("b", int, module.place)]);
    let call = maker.structure("vhost_vring_call", 8, &[("ctx", pointer, module.inside)]);
    let call = maker.add(TYPEDEF, "call_t", (false, 0), call, &[]);
    let calls = maker.add(ARRAY, "", (false, 0), 0, &[call, int, 2]);
    let either = maker.union("", 8, &[("x", int, 0), ("y", int, module.nameless)]);
    maker.structure("vhost_virtqueue", 32, &[("calls", calls, 0), ("", either, 128)]);
    maker.structure("vhost_worker", 4, &[("id", int, 0)]);
    maker.structure("vhost_poll", 4, &[("mask", int, 0)]);
    let more = [("fn", pointer, 0), ("flags", int, 64)];
    maker.structure("vhost_work", 16, if module.more { &more } else { &more[..1] });
    if module.iotlb {
        maker.structure("vhost_iotlb", 16, &[("list", 3, 0)]);
    }
    let (tagged, device) = (maker.tagged(int), maker.pointer(device));
    let constant = maker.constant(tagged);
    let takes = match module.takes {
        0 => vec![device],
        1 => vec![device, int],
        _ => vec![device, constant],
    };
    let prototype = maker.prototype(int, &takes);
    if ours {
        let call = maker.pointer(prototype);
        maker.structure(CALLS, 8, &[(module.function, call, 0)]);
    } else {
        maker.function(module.function, prototype);
    }
}

fn compared(vhost: &Module, ours: &Module) -> Result<(), LayoutError> {
    let base = base();
    let (mut left, mut right) = (Maker::split(&base), Maker::split(&base));
    module(&mut left, vhost, false);
    module(&mut right, ours, true);
    compare(&base.bytes(), Some(&left.bytes()), &right.bytes())
}

/// The first difference to a vhost that is as it is.
fn difference(ours: Module) -> String {
    match compared(&SAME, &ours) {
        Err(LayoutError::Differs(what)) => what,
        other => panic!("{other:?}"),
    }
}

#[test]
fn modules_of_the_same_header_agree() {
    assert_eq!(compared(&SAME, &SAME), Ok(()));
}

#[test]
fn qualifiers_and_tags_make_no_difference() {
    assert_eq!(compared(&SAME, &Module { takes: 2, ..SAME }), Ok(()));
}

#[test]
fn a_vhost_that_is_no_module_is_found_in_the_kernel() {
    let mut kernel = base();
    module(&mut kernel, &SAME, false);
    let (mut good, mut bad) = (Maker::split(&kernel), Maker::split(&kernel));
    module(&mut good, &SAME, true);
    module(&mut bad, &Module { bytes: 32, ..SAME }, true);

    assert_eq!(compare(&kernel.bytes(), None, &good.bytes()), Ok(()));
    assert!(compare(&kernel.bytes(), None, &bad.bytes()).is_err());
}

#[test]
fn the_first_difference_is_named() {
    assert_eq!(
        difference(Module { place: 96, ..SAME }),
        "struct vhost_dev has b at bit 64 (int) in vhost and b at bit 96 (int) in vhost_blk"
    );
    assert_eq!(
        difference(Module { bytes: 32, ..SAME }),
        "struct vhost_dev has 24 bytes in vhost, 32 in vhost_blk"
    );
    assert_eq!(
        difference(Module { more: true, ..SAME }),
        "struct vhost_work has 1 members in vhost, 2 in vhost_blk"
    );
    assert_eq!(
        difference(Module { inside: 8, ..SAME }),
        "struct vhost_vring_call has ctx at bit 0 (void *) in vhost and ctx at bit 8 (void *) in \
         vhost_blk"
    );
    assert!(difference(Module { nameless: 32, ..SAME }).contains("y at bit 32: int"));
    assert_eq!(difference(Module { iotlb: false, ..SAME }), "vhost_blk has no struct vhost_iotlb");
    assert_eq!(
        difference(Module { takes: 0, ..SAME }),
        "vhost_stop is int (struct vhost_dev *, int) in vhost, int (struct vhost_dev *) in \
         vhost_blk"
    );
    assert_eq!(
        difference(Module { function: "vhost_halt", ..SAME }),
        "vhost has no function vhost_halt"
    );
}

#[test]
fn a_module_that_does_not_say_what_it_calls_is_not_used() {
    let base = base();
    let mut vhost = Maker::split(&base);
    module(&mut vhost, &SAME, false);

    let got = compare(&base.bytes(), Some(&vhost.bytes()), &vhost.bytes());

    assert!(matches!(&got, Err(LayoutError::Unknown(why)) if why.contains(CALLS)), "{got:?}");
}

#[test]
fn types_that_name_themselves_end_the_comparison() {
    let base = base();
    let mut vhost = Maker::split(&base);
    // Its own number: a pointer to itself, and a typedef of itself.
    let pointer = vhost.add(PTR, "", (false, 0), 4, &[]);
    let alias = vhost.add(TYPEDEF, "alias", (false, 0), 5, &[]);
    assert_eq!((pointer, alias), (4, 5));
    let mut loops = vhost.clone();
    vhost.structure("vhost_dev", 8, &[("a", pointer, 0)]);
    loops.structure("vhost_dev", 8, &[("a", alias, 0)]);

    for maker in [vhost, loops] {
        let got = compare(&base.bytes(), Some(&maker.bytes()), &maker.bytes());
        assert!(matches!(got, Err(LayoutError::Unknown(_))), "{got:?}");
    }
}

#[test]
fn nameless_structures_inside_one_another_end_the_comparison() {
    let base = base();
    let mut vhost = Maker::split(&base);
    let mut inner = 1;
    for _ in 0..30 {
        let members: Vec<(&str, u32, u32)> = (0..8).map(|_| ("", inner, 0)).collect();
        inner = vhost.structure("", 4, &members);
    }
    vhost.structure("vhost_dev", 8, &[("a", inner, 0)]);

    let got = compare(&base.bytes(), Some(&vhost.bytes()), &vhost.bytes());

    assert!(matches!(got, Err(LayoutError::Unknown(_))), "{got:?}");
}

#[test]
fn any_bytes_are_survived() {
    let base = base();
    let (mut vhost, mut ours) = (Maker::split(&base), Maker::split(&base));
    module(&mut vhost, &SAME, false);
    module(&mut ours, &SAME, true);
    let files = [base.bytes(), vhost.bytes(), ours.bytes()];
    let mut prng = Prng::new(7);
    let mut random = |below: usize| usize::try_from(prng.below(below as u64)).unwrap();

    for _ in 0..20_000 {
        let mut files = files.clone();
        let file = &mut files[random(3)];
        for _ in 0..=random(3) {
            let at = random(file.len());
            file[at] = u8::try_from(random(256)).unwrap();
        }
        let [base, vhost, ours] = files;
        let _ = compare(&base, Some(&vhost), &ours);
    }
}

#[test]
fn the_message_says_what_to_do() {
    let error =
        LayoutError::Differs("struct vhost_dev has 24 bytes in vhost, 32 in vhost_blk".into());
    let unknown = LayoutError::Unknown("/sys/kernel/btf/vhost_blk: No such file".into());

    assert!(error.to_string().ends_with("build it for this kernel (make -C kernel/vhost-blk)"));
    assert!(unknown.to_string().contains("it needs a kernel and a module with BTF"));
}
