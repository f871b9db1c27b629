use super::*;

fn view(words: &[(&str, &str)], image: Option<(&str, Identity)>) -> ClientView {
    ClientView {
        takes_jobs: true,
        more: Vec::new(),
        image: image.map(|(name, id)| Image { name: name.to_owned(), identity: Some(id) }),
        options: words.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
    }
}

fn layers(all: &[(&str, Identity, &'static str)]) -> Vec<(Image, Option<&'static str>)> {
    let layer = |(name, id, format): &(&str, Identity, &'static str)| {
        (Image { name: (*name).to_owned(), identity: Some(*id) }, Some(*format))
    };
    all.iter().map(layer).collect()
}

#[test]
fn each_difference_is_named_with_both_values() {
    let old = view(&[("--queues", "2"), ("--serial", "a"), ("--size", "")], None);
    assert_eq!(old.compare(&old, &[]), Ok(()));
    let new = view(&[("--queues", "3"), ("--serial", ""), ("--size", "4096")], None);
    assert_eq!(
        old.compare(&new, &[]).expect_err("it differs"),
        "--queues is '2' there, '3' here; --serial is 'a' there, not given here; \
         --size is not given there, '4096' here"
    );
}

#[test]
fn options_that_only_one_of_two_versions_knows_are_not_compared() {
    let old = view(&[("--queues", "2"), ("--old", "1")], None);
    let new = view(&[("--queues", "2"), ("--new", "1")], None);
    assert_eq!(old.compare(&new, &[]), Ok(()));
    let nothing: ClientView = serde_json::from_str("{\"of\":\"another version\"}").expect("words");
    assert_eq!(old.compare(&nothing, &[]), Ok(()));
}

#[test]
fn an_image_is_known_by_its_name_its_file_and_what_is_on_top_of_it() {
    let old = view(&[], Some(("/a", (1, 2))));
    let layers = layers(&[("/top", (1, 3), "qcow2"), ("/a", (1, 2), "raw")]);
    for same in [("/a", (1, 9)), ("/link", (1, 2)), ("/top", (1, 9)), ("/link", (1, 3))] {
        assert_eq!(old.compare(&view(&[], Some(same)), &layers), Ok(()), "{same:?}");
    }
    let other = view(&[], Some(("/b", (1, 4))));
    let why = old.compare(&other, &layers).expect_err("another image");
    assert_eq!(why, "the image is '/top', not '/b'");
    assert_eq!(old.compare(&other, &[]).expect_err("too"), "the image is '/a', not '/b'");
}

#[test]
fn the_format_of_words_that_name_the_image_on_top_is_that_of_this_image() {
    let named = |format, image| view(&[("--format", format)], Some(image));
    let old = named("raw", ("/a", (1, 2)));
    let layers = layers(&[("/top", (1, 3), "qcow2"), ("/a", (1, 2), "raw")]);
    let compare = |new: &ClientView| old.compare(new, &layers);
    assert_eq!(compare(&named("qcow2", ("/top", (1, 3)))), Ok(()));
    assert_eq!(compare(&named("raw", ("/a", (1, 2)))), Ok(()));
    let why = compare(&named("raw", ("/top", (1, 3)))).expect_err("it is none");
    assert_eq!(why, "--format is 'qcow2' there, 'raw' here");
    let why = compare(&named("qcow2", ("/a", (1, 2)))).expect_err("it is none");
    assert_eq!(why, "--format is 'raw' there, 'qcow2' here");
}

/// A mirror has moved the disk, and overlays were put on the image that it was moved to.
#[test]
fn an_image_that_a_disk_was_moved_to_is_named_below_others() {
    let named = |format, image| view(&[("--format", format)], Some(image));
    let old = named("qcow2", ("/a", (1, 2)));
    let layers = layers(&[("/top", (1, 4), "qcow2"), ("/moved", (1, 3), "raw")]);
    let compare = |new: &ClientView| old.compare(new, &layers);
    assert_eq!(compare(&named("raw", ("/moved", (1, 3)))), Ok(()));
    assert_eq!(compare(&named("qcow2", ("/top", (1, 4)))), Ok(()));
    let why = compare(&named("qcow2", ("/moved", (1, 3)))).expect_err("it is raw");
    assert_eq!(why, "--format is 'raw' there, 'qcow2' here");
    assert!(compare(&named("raw", ("/other", (1, 5)))).is_err());
}
