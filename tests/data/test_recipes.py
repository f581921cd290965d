"""Readers of published logs, on small files of the published layout."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest

from megalith.data import AvazuReader, CriteoReader, DenseColumn, KuaiRandReader, TaobaoReader
from megalith.errors import InputError
from megalith.hashing import hash_strings
from tests.data.support import check_resume, check_shards, labels_of


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def hashes(*texts: str) -> list[int]:
    return hash_strings(list(texts)).tolist()


def criteo_line(label: int, ints: list[str], categories: list[str]) -> str:
    return "\t".join([str(label), *ints, *categories])


def test_criteo(tmp_path: Path) -> None:
    full = criteo_line(1, [str(i) for i in range(13)], [f"{i:08x}" for i in range(26)])
    sparse = criteo_line(0, ["-2", *[""] * 12], [""] * 25 + ["68fd1e64"])
    path = write(tmp_path / "day_0.gz", f"{full}\n{sparse}\n")
    (batch,) = CriteoReader(path, batch_size=4)
    assert batch.labels.tolist() == [1.0, 0.0]
    assert list(batch.features) == [f"C{i}" for i in range(1, 27)]
    assert batch.features["C1"].to_lists() == [hashes("00000000"), []]
    assert batch.features["C26"].to_lists() == [hashes("00000019"), hashes("68fd1e64")]
    assert batch.dense.shape == (2, 13)
    assert batch.dense[0].tolist() == pytest.approx([math.log1p(i) for i in range(13)])
    assert batch.dense[1].tolist() == pytest.approx([-math.log(3)] + [0.0] * 12)

    rows = [criteo_line(0, [str(i)] * 13, ["a"] * 26).split("\t", 1)[1] for i in (1, 3)]
    reader = CriteoReader(
        write(tmp_path / "test.txt", "\n".join(rows)), batch_size=4, labelled=False, normalise="standard"
    )
    reader = reader.with_schema(reader.fit())
    assert reader.schema.dense_columns[0] == DenseColumn("I1", "standard", mean=2.0, std=1.0)
    (batch,) = reader
    assert batch.dense[:, 0].tolist() == [-1.0, 1.0]
    assert all(math.isnan(label) for label in batch.labels.tolist())

    with pytest.raises(InputError, match=r"test.txt: line 1 has 39 columns, not 40"):
        list(CriteoReader(write(tmp_path / "test.txt", full.replace("\t", " ", 1)), batch_size=3))


def test_the_days_of_the_criteo_terabyte_are_read_in_their_order(tmp_path: Path) -> None:
    for day in (10, 2, 0):
        row = criteo_line(day % 4 // 2, [str(day)] * 13, ["a"] * 26)
        write(tmp_path / f"day_{day}.gz", f"{row}\n")
    write(tmp_path / "readme.txt", "no data")
    (batch,) = CriteoReader(tmp_path, batch_size=4, normalise="none")
    assert batch.dense is not None
    assert batch.dense[:, 0].tolist() == [0.0, 2.0, 10.0]
    kaggle = tmp_path / "kaggle"
    write(kaggle / "train.txt", criteo_line(1, ["1"] * 13, ["a"] * 26))
    write(kaggle / "test.txt", criteo_line(1, ["2"] * 13, ["a"] * 26).split("\t", 1)[1])
    assert labels_of(CriteoReader(kaggle, batch_size=4)) == [1.0]
    (batch,) = CriteoReader(kaggle, batch_size=4, labelled=False, normalise="none")
    assert batch.dense is not None
    assert batch.dense[0, 0] == 2.0


AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
    "device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n"
)


def test_avazu(tmp_path: Path) -> None:
    ids = "1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,ddd2926e,44956a24,1,2"
    rows = [f"{i}000,{i % 2},1410270{i},{ids},15706,320,50,1722,0,35,-1,79\n" for i in range(9)]
    path = write(tmp_path / "train.gz", AVAZU + "".join(rows))
    write(tmp_path / "sampleSubmission.gz", "id,click\n")
    (batch,) = AvazuReader(tmp_path, batch_size=16)
    assert batch.labels.tolist() == [i % 2 for i in range(9)]
    assert len(batch.features) == 21
    assert batch.features["site_id"].to_lists()[0] == hashes("1fbe01fe")
    assert batch.features["C20"].to_lists()[0] == hashes("-1")
    assert batch.time == 1_414_368_000 + 8 * 3600
    check_resume(lambda: AvazuReader(path, batch_size=4, shuffle=1))
    test = write(tmp_path / "test.gz", (AVAZU + rows[0]).replace(",click", "").replace("0000,0,", "0000,"))
    (batch,) = AvazuReader(tmp_path, batch_size=16, labelled=False)
    assert math.isnan(batch.labels[0])
    assert len(list(AvazuReader(test, batch_size=1, labelled=False))) == 1


def taobao(folder: Path) -> Path:
    rows = [
        f"{user},149413{i}000,{ad},430548_1007,{1 - i % 2},{i % 2}\n"
        for i, (user, ad) in enumerate([(581738, 1), (449818, 2), (914836, 1), (581738, 9)])
    ]
    write(folder / "raw_sample.csv", "user,time_stamp,adgroup_id,pid,nonclk,clk\n" + "".join(rows))
    write(
        folder / "ad_feature.csv",
        "adgroup_id,cate_id,campaign_id,customer,brand,price\n1,6406,83237,1,95471,170.0\n2,6407,83,2,NULL,99\n",
    )
    write(
        folder / "user_profile.csv",
        "userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,occupation,"
        "new_user_class_level \n581738,0,5,2,5,,3,0,3\n914836,0,2,1,2,2,3,1,\n",
    )
    return folder


def test_taobao_joins_the_features_of_ads_and_users(tmp_path: Path) -> None:
    (batch,) = TaobaoReader(taobao(tmp_path), batch_size=16, normalise="none")
    assert batch.labels.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert batch.features["cate_id"].to_lists() == [hashes("6406"), hashes("6407"), hashes("6406"), []]
    assert batch.features["new_user_class_level"].to_lists() == [hashes("3"), [], [], hashes("3")]
    assert batch.features["pvalue_level"].to_lists() == [[], [], hashes("2"), []]
    assert batch.dense is not None
    assert batch.dense[:, 0].tolist() == [170.0, 99.0, 170.0, 0.0]
    assert batch.time == 1_494_133_000
    check_resume(lambda: TaobaoReader(tmp_path, batch_size=1, shuffle=3, shuffle_rows=3))
    check_shards(lambda: TaobaoReader(tmp_path, batch_size=1), (1, 2))
    (tmp_path / "ad_feature.csv").unlink()
    (batch,) = TaobaoReader(tmp_path / "raw_sample.csv", batch_size=16)
    assert "cate_id" not in batch.features
    assert batch.dense is None
    write(tmp_path / "user_profile.csv", "uid,cms_segid\n1,2\n")
    with pytest.raises(
        InputError, match=r"user_profile.csv: column 'userid' is missing; the file has uid, cms"
    ):
        TaobaoReader(tmp_path, batch_size=1)


LOG = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
)


def test_kuairand(tmp_path: Path) -> None:
    for number, first in enumerate((0, 4)):
        rows = [
            f"{i},{i % 2},20220408,1400,164939829{i}123,{i % 2},0,0,0,0,0,{i // 4},1,{1000 * i},0,0,0,0,1\n"
            for i in range(first, first + 4)
        ]
        write(tmp_path / f"log_standard_{number}_pure.csv", LOG + "".join(rows))
    onehot = ",".join(f"onehot_feat{i}" for i in range(18))
    write(
        tmp_path / "user_features_pure.csv",
        "user_id,user_active_degree,follow_user_num_range,fans_user_num_range,friend_user_num_range,"
        f"register_days_range,{onehot}\n" + "0,full_active,0,0,0,367-730," + ",".join(["1"] * 18) + "\n",
    )
    write(
        tmp_path / "video_features_basic_pure.csv",
        "video_id,author_id,video_type,upload_type,music_id,music_type,tag\n"
        '0,7,NORMAL,ShortImport,3,9,"12,65"\n1,8,AD,Web,4,9,\n',
    )
    (batch,) = KuaiRandReader(tmp_path, batch_size=16, label=["is_click", "long_view"], normalise="none")
    assert batch.labels.tolist() == [[i % 2, i // 4] for i in range(8)]
    assert batch.features["tag"].to_lists()[:2] == [hashes("12", "65"), []]
    assert batch.features["onehot_feat3"].to_lists()[:2] == [hashes("1"), []]
    assert batch.features["author_id"].to_lists()[:2] == [hashes("7"), hashes("8")]
    assert batch.dense is not None
    assert batch.dense[:, 0].tolist() == [1000.0 * i for i in range(8)]
    assert batch.time == 1_649_398_297
    assert labels_of(KuaiRandReader(tmp_path, batch_size=4)) == [float(i % 2) for i in range(8)]
